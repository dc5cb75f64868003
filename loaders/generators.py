"""Seeds the random generators that are held by what a loader calls: dataset, collate_fn and transforms.

They are seeded before each sample, as the global ones are, and those of a batch's transforms before each batch. Forked
workers inherit equal generators, and would repeat each other's numbers; and a resume would begin with other states.
Invariant: each generator gets a seed of its own, a function of the sample's key and the generator's number alone.

They are searched for once per epoch (held.py). A sample may replace a generator, make one, or import a module that has
one. So the places that hold objects are compared before and after each batch, by identity: if a place holds another
object, the search runs again. If it finds more generators after a batch, the batch may have drawn from one that was
not seeded, and is read again. `read_batch` and transforms of batches should draw from their `random`: for them nothing
is compared, and no batch is read again. A stream's batch is not read again either.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .errors import warn_once
from .held import Held
from .randomness import GOLDEN, MASK, global_states, mix, restore_globals, seed_globals

UNSEEDABLE = (
    "a dataset, collate_fn or transform holds a %s, which the loader cannot seed: it differs from run to run and "
    "after a resume; draw from the global generators of Python, numpy or torch, or from the `random` that "
    "read_batch and a batch's transform get"
)
ITERATOR = (
    "a dataset, collate_fn or transform holds an iterator (%s): if reading a sample advances it, samples "
    "depend on the number of workers, and differ after a resume; compute what it gives from the index"
)


class Seeder:
    """Seeds the global generators, and those that are held by what a loader calls.

    callables_only: seed only generators in callable objects: a stream's transforms, not its own shuffling.
    """

    def __init__(self, *called: Any, callables_only: bool = False) -> None:
        self._called = called
        self._callables_only = callables_only
        self._epoch: int | None = None
        self._search()

    def _search(self) -> None:
        self._held = Held(self._called, self._callables_only)
        self._held.follow_code()
        worker = get_worker_info()
        number = 0 if worker is None else object.__getattribute__(worker, "id")  # a stream notes who asks by worker.id
        if number == 0:
            for kind in self._held.iterators:
                warn_once(ITERATOR, kind)
        reseeds = [(generator, reseeder(generator)) for generator in self._held.generators.values()]
        self._seedable = [generator for generator, reseed in reseeds if reseed is not None]
        self.reseeds = [reseed for _, reseed in reseeds if reseed is not None]

    def update(self, epoch: int, compares: bool = True) -> None:
        """Is called before a batch. Searches again in a new epoch and, with `compares`, if an object was replaced."""
        is_new_epoch = self._epoch not in (None, epoch)
        if is_new_epoch or (compares and self._held.has_changed()):
            self._search()
        self._epoch = epoch

    def finds_more(self) -> bool:
        """Is called after a batch was read. Returns whether reading it has made generators: they will be seeded."""
        count = len(self.reseeds)
        if self._held.has_changed():
            self._search()
        return len(self.reseeds) > count

    def __call__(self, key: int) -> None:
        seed_globals(key)
        self.seed_held(key)

    def seed_held(self, key: int | np.ndarray) -> None:
        """Seeds only the generators that are held, as another thread may draw from the global ones. key: 64 bits."""
        for number, reseed in enumerate(self.reseeds, 1):
            reseed(mix(int(key) + number * GOLDEN & MASK))

    def keep_held(self) -> Callable[[], None]:
        """Returns a function that sets the generators that are held back to their states of now."""
        rewinds = [rewinder(generator) for generator in self._seedable]

        def restore() -> None:
            for rewind in rewinds:
                rewind()

        return restore

    def keep(self) -> Callable[[], None]:
        """The same for the global generators, too."""
        states = global_states()
        restore_held = self.keep_held()

        def restore() -> None:
            restore_globals(states)
            restore_held()

        return restore


def reseeder(generator: Any) -> Callable[[int], object] | None:
    """Returns what reseeds a generator in place, by 64 bits. Warns, once, of one that cannot be seeded."""
    if isinstance(generator, torch.Generator) and generator.device.type != "cpu" and get_worker_info() is not None:
        warn_once(UNSEEDABLE, f"torch.Generator on {generator.device}")  # a forked process must not touch the device
        return None
    if isinstance(generator, random.SystemRandom):
        warn_once(UNSEEDABLE, "random.SystemRandom")
        return None
    if isinstance(generator, np.random.BitGenerator):
        return partial(reseed_numpy, generator)
    if isinstance(generator, np.random.RandomState):
        return lambda seed: generator.seed(seed & 0xFFFFFFFF)
    if isinstance(generator, random.Random):
        return generator.seed
    # >> 1 is not needed, as torch takes 64 bits: it stays because the numbers would change.
    return lambda seed: generator.manual_seed(seed >> 1)


def rewinder(generator: Any) -> Callable[[], object]:
    """Returns what sets a generator back to its state of now."""
    if isinstance(generator, np.random.BitGenerator):
        return partial(setattr, generator, "state", generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())  # numpy's RandomState, and torch's


def reseed_numpy(bits: Any, seed: int) -> None:
    if not isinstance(bits, np.random.PCG64):
        bits.state = type(bits)(seed).state
        return
    # default_rng() makes this kind. Its state is set as numbers: hashing a seed takes numpy ten times as long.
    state: Any = {"state": mix(seed) << 64 | seed, "inc": seed << 64 | 1}
    bits.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
