"""Reseeds the random generators that are held by what a loader calls: dataset, collate_fn and transforms.

They are seeded before each sample, as the global ones are, and those of a batch's transforms before each batch. Forked
workers inherit equal generators, and would repeat each other's numbers; and a resume would begin with other states.
Invariant: each generator gets a seed of its own, a function of the sample's key and of its number among them alone.

They are searched once in an epoch (held.py). Before each batch the places that hold objects are compared, by identity,
as an object may replace its generator: if one holds another object, the search runs again. For `read_batch`, and for
transforms of batches, which should draw from their `random`, that is left out.
"""

from typing import Any

import numpy as np

from .held import Held, Places
from .randomness import GOLDEN, MASK, mix, seed_globals


class Seeder:
    """Seeds the global generators, and those that are held by what a loader calls.

    For an object in which no generator is found, and which has `set_random_seed(seed)`, that is called.
    callables_only: only the generators of objects that can be called: of transforms, not of streams.
    """

    def __init__(self, *called: Any, callables_only: bool = False) -> None:
        self._called = called
        self._counts = not callables_only
        self._epoch: int | None = None
        self._search()

    def _search(self) -> None:
        """Searches everything."""
        held = Held(self._called, self._counts)
        near = dict(held.reseeds)
        self._near = Places(held.holders, held.names)
        names = dict(held.names)
        watched = held.follow_code()
        self._kept = [held]  # with its objects: an id is reused
        self._far = Places(watched, {name: held.names[name] for name in held.names.keys() - names.keys()})
        self._far_reseeds = {number: reseed for number, reseed in held.reseeds.items() if number not in near}
        self.reseeds = [*held.reseeds.values()]

    def update(self, epoch: int, compares: bool = True) -> None:
        """Is called before a batch. Searches again if the epoch is another one or, if it compares, for another object.

        For one in an attribute it does not follow code again, nor search long containers, as this takes longer.
        """
        if epoch != self._epoch or (compares and self._far.have_changed()):
            self._search()
        elif compares and self._near.have_changed():
            held = Held(self._called, self._counts)
            self._near = Places(held.holders, held.names)
            self._kept[1:] = [held]
            self.reseeds = [*(held.reseeds | self._far_reseeds).values()]
        self._epoch = epoch

    def __call__(self, key: int) -> None:
        seed_globals(key)
        self.seed_held(key)

    def seed_held(self, key: int | np.ndarray) -> None:
        """Seeds only the generators that are held: where another thread may draw from the global ones."""
        for number, reseed in enumerate(self.reseeds, 1):
            reseed(mix(int(key) + number * GOLDEN & MASK))
