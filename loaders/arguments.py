"""Checks of the loaders' arguments; each error says what to give instead."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

LAST_BATCH = ("keep", "drop", "rollover")
ON_ERROR = ("raise", "skip")


class LoaderConfigError(ValueError):
    """A loader setting that cannot work. The message names the key, its value, and what to use instead."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Returns "did you mean NAME? " with the most similar known name, or "" if none is similar."""
    near = get_close_matches(str(given), list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


def check_choice(key: str, value: str, choices: Iterable[str], error: type[ValueError] = ValueError) -> None:
    """Raises `error` unless `value` is one of `choices`."""
    if value not in choices:
        raise error(f"{key}={value}: {did_you_mean(value, choices)}it is one of {', '.join(choices)}")


def as_index(value: Any) -> int:
    """Returns an integer, numpy's too, as an int; -1 for a bool and for anything that is not an integer."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def checked_seed(seed: Any) -> int:
    """Returns the seed as an int. Raises ValueError if it is not an integer from 0 to 2^64 - 1."""
    number = as_index(seed)
    if not 0 <= number < 2**64:
        raise ValueError(f"seed={seed!r}: give an integer from 0 to 2^64 - 1")
    return number


def checked_last_batch(last_batch: str | None, drop_last: bool) -> tuple[bool, bool]:
    """Returns whether samples that do not fill a batch are dropped, and whether they begin the next epoch.

    If `last_batch` is None, torch's argument `drop_last` decides. Raises ValueError for an unknown `last_batch`, and
    if the two contradict each other.
    """
    if last_batch is None:
        return drop_last, False
    check_choice("last_batch", last_batch, LAST_BATCH)
    if drop_last and last_batch != "drop":
        raise ValueError(f"last_batch={last_batch!r} and drop_last=True contradict each other: give only one of them")
    return last_batch == "drop", last_batch == "rollover"


def check_arguments(
    loader: Any,
    num_workers: int | str,
    timeout: float,
    multiprocessing_context: Any,
    generator: Any,
    prefetch_factor: int | str | None,
) -> None:
    """Raises ValueError for arguments of a WorkerLoader that torch does not check and that cannot work.

    It is called before DataLoader.__init__: `loader` has only the arguments that WorkerLoader adds as attributes, so
    the DataLoader's own arguments are passed separately.
    """
    check_choice("worker_method", loader.worker_method, ("multiprocessing", "thread"))
    check_choice("on_error", loader.on_error, ON_ERROR)
    seed, restarts, batches = loader.seed, loader.max_restarts, loader.prefetch_batches
    for name, value in (("num_workers", num_workers), ("prefetch_factor", prefetch_factor)):
        if isinstance(value, str) and (value != "auto" or seed is None):
            raise ValueError(
                f"{name}={value!r}: give a number, or 'auto' if there is a seed: without one the batches "
                "depend on the number of workers"
            )
    for name, value in (("num_workers", num_workers), ("prefetch_factor", prefetch_factor), ("rank", loader.rank)):
        is_left_out = name == "prefetch_factor" and value is None
        is_number = hasattr(value, "__index__") and not isinstance(value, bool)
        if seed is not None and not (is_number or isinstance(value, str) or is_left_out):
            raise ValueError(f"{name}={value!r}: give an integer from 0")
    wrong = ""
    if as_index(restarts) < 0:
        wrong = f"max_restarts={restarts!r}: give an integer from 0"
    elif not math.isfinite(timeout):
        wrong = f"timeout={timeout}: give a number of seconds, or 0 for no limit"
    elif loader.worker_method == "thread" and multiprocessing_context is not None:
        wrong = "worker_method='thread' starts no processes: leave out multiprocessing_context"
    # Libraries that rebuild a loader pass its prefetch_factor on: 2 if the argument was left out.
    elif batches is not None and (prefetch_factor not in (None, 2) or batches < 1):
        wrong = f"prefetch_batches={batches}: give the total number of batches to load ahead, from 1, and leave out "
        wrong += "prefetch_factor, which is the number per worker"
    elif seed is not None and generator is not None:
        wrong = f"seed={seed} and a generator were given: with a seed, leave out the generator"
    elif seed is None and (loader.rank, loader.world_size) != (0, 1):
        wrong = f"rank={loader.rank} and world_size={loader.world_size} need a seed, from which all ranks compute the "
        wrong += "same order"
    if wrong:
        raise ValueError(wrong)


def check_stream_arguments(loader: Any, dataset: Any, shuffle: bool | None) -> None:
    """Raises ValueError for arguments of a WorkerLoader that cannot work with an iterable dataset."""
    seed, streams, ranks, steps = loader.seed, loader.streams, loader.world_size, loader.steps_per_epoch
    wrong = ""
    if loader.worker_method == "thread":
        wrong = (
            "worker_method='thread' needs a map-style dataset: get_worker_info(), by which an iterable one is split, "
        )
        wrong += "is the same in all threads"
    elif seed is None and (loader.on_error == "skip" or loader.shuffle_buffer or steps is not None):
        wrong = "on_error='skip', shuffle_buffer and steps_per_epoch need a seed for an iterable dataset: give seed=0"
    elif seed is not None and shuffle:
        wrong = f"shuffle={shuffle}: {type(dataset).__name__} is iterable, which cannot be permuted: give "
        wrong += "shuffle_buffer=1000, to shuffle each 1,000 successive samples of a stream"
    elif as_index(streams) < 1 or as_index(loader.shuffle_buffer) < 0 or (steps is not None and as_index(steps) < 1):
        wrong = f"streams={streams!r}, shuffle_buffer={loader.shuffle_buffer!r} and steps_per_epoch={steps!r}: give "
        wrong += "integers, from 1, 0 and 1"
    elif streams % ranks:
        wrong = f"streams={streams} cannot be shared evenly by world_size={ranks}: give a multiple of {ranks}"
    elif ranks > 1 and getattr(dataset, "_distributed", None) is not None:
        wrong = f"{type(dataset).__name__} is split by rank already, and the loader would split it again: leave out "
        wrong += "split_dataset_by_node"
    if wrong:
        raise ValueError(wrong)
