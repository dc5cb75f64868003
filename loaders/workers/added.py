"""What a WorkerLoader adds to a DataLoader: its settings, and what runs.

All of it is one attribute of the loader, `_added`, beside the methods `stats` and `close`. Other names belong to the
program: its subclass may have methods and attributes called `rank` or `pad`, as under torch's class.
"""

from __future__ import annotations

import weakref
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .stats import Stats

if TYPE_CHECKING:
    from .autotune import Tuner
    from .epochs import EngineEpochs


@dataclass
class Added:
    """The arguments that DataLoader does not have, and the loader's iterators, epochs and figures."""

    seed: int | None
    rank: int
    world_size: int
    pad: bool
    last_batch: str | None
    prefetch_batches: int | None
    worker_method: str
    on_error: str
    max_restarts: int
    streams: int
    shuffle_buffer: int
    steps_per_epoch: int | None
    tuner: Tuner | None = None  # chooses how many workers get tasks; None: all of them
    bounds_memory: bool = False  # the batches loaded ahead may take at most an eighth of the available memory
    closed: bool = False
    epochs: EngineEpochs | None = None  # with a seed
    stats: Stats | None = None  # of the newest engine
    iterators: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # all that exist

    def given(self) -> dict[str, Any]:
        """Returns the arguments whose values are not the usual ones; with a seed, these are the loader's attributes.

        Libraries make a loader anew from its attributes, or from the arguments that it got.
        """
        return {name: getattr(self, name) for name, usual in USUAL.items() if getattr(self, name) != usual}

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and pickled: a copy has its own epochs, and no workers or iterators."""
        own = {"epochs": copy(self.epochs), "tuner": deepcopy(self.tuner), "stats": None, "iterators": None}
        return {**vars(self), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, iterators=weakref.WeakSet())


USUAL = {
    **dict.fromkeys(("seed", "last_batch", "prefetch_batches", "steps_per_epoch")),
    **{"streams": 8, "shuffle_buffer": 0},
    **{"rank": 0, "world_size": 1, "pad": True, "max_restarts": 3},
    **{"worker_method": "multiprocessing", "on_error": "raise"},
}
