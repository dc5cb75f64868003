"""Checks the arguments of a WorkerLoader that torch does not check: an error says what to give instead."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import IterableDataset

from .base import check_choice


def check_arguments(
    loader: Any,
    dataset: Any,
    num_workers: int | str,
    timeout: float,
    context: Any,
    generator: Any,
    prefetch_factor: int | str | None,
) -> None:
    """Raises ValueError for arguments of ours that cannot work, alone or with the other ones.

    This is called before the DataLoader's __init__, so `loader`, a WorkerLoader, has only its own arguments as
    attributes. Those of the DataLoader are passed beside it.
    """
    check_choice("worker_method", loader.worker_method, ("multiprocessing", "thread"))
    check_choice("on_error", loader.on_error, ("raise", "skip"))
    seed, restarts, batches = loader.seed, loader.max_restarts, loader.prefetch_batches
    is_iterable = isinstance(dataset, IterableDataset)
    wrong = ""
    for name, value in (("num_workers", num_workers), ("prefetch_factor", prefetch_factor)):
        if isinstance(value, str) and (value != "auto" or seed is None):
            raise ValueError(
                f"{name}={value!r}: give a number, or 'auto' if there is a seed: without one the batches "
                "depend on the number of workers"
            )
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        wrong = f"max_restarts={restarts!r}: give a number from 0"
    elif not math.isfinite(timeout):
        wrong = f"timeout={timeout}: give a number of seconds, or 0 to wait for ever"
    elif loader.worker_method == "thread" and context is not None:
        wrong = "worker_method='thread' starts no processes: leave out multiprocessing_context"
    elif loader.on_error == "skip" and is_iterable:
        wrong = "on_error='skip' needs a map-style dataset: an iterable one ends at its first error"
    # Libraries that rebuild a loader pass its prefetch_factor on: 2 if the argument was left out.
    elif batches is not None and (prefetch_factor not in (None, 2) or batches < 1):
        wrong = f"prefetch_batches={batches}: give the number of batches to load ahead in all, from 1, "
        wrong += "and leave out prefetch_factor, which counts each worker's"
    elif seed is not None and generator is not None:
        wrong = f"seed={seed} and a generator were given: with a seed, leave out the generator"
    elif seed is not None and is_iterable:
        wrong = f"seed={seed} needs a map-style dataset: an iterable one has its own order"
    elif seed is None and (loader.rank, loader.world_size) != (0, 1):
        wrong = f"rank={loader.rank} and world_size={loader.world_size} need a seed, from which all ranks compute the "
        wrong += "same order"
    if wrong:
        raise ValueError(wrong)
