"""Reads a task's samples and makes a batch of them; every worker does this, in any process or thread."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..randomness import Random, fold, seed_globals
from .batch_buffer import ALIGNMENT, BatchBuffer
from .shared_memory import align
from .streams import Progress
from .tasks import Task

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
Mark = Callable[[int], None]  # gets the number of the row that is read next

log = logging.getLogger(__name__)

# With LOADERS_DEBUG=1 each batch is read two more times, into memory that was filled with one of these bytes. A row
# that keeps its fill both times was not written.
DEBUG_FILLS = (0xA5, 0x5A)


def offers(dataset: Any, method: str) -> bool:
    """Returns whether the dataset's class has `method`, and no subclass has overridden only `__getitem__`.

    If a subclass overrides `__getitem__` (or `__getitems__`) alone, the inherited method reads other samples, so it
    does not count. Methods that a wrapper forwards by `__getattr__` do not count either.
    """
    owner = _owner(dataset, method)
    readers = [_owner(dataset, name) for name in ("__getitem__", "__getitems__")]
    if not callable(getattr(dataset, method, None)):  # an instance may have switched it off
        return False
    return owner is not None and all(reader is None or issubclass(owner, reader) for reader in readers)


def _owner(dataset: Any, method: str) -> type | None:
    """Returns the class that defines `method` for the dataset; None if there is none, or if it sets it to None."""
    owner = next((kind for kind in type(dataset).__mro__ if method in vars(kind)), None)
    return None if owner is None or vars(owner)[method] is None else owner


def spec_of(dataset: Any) -> Spec | None:
    """Returns the `sample_spec()` of a dataset that offers `read_batch`, else None.

    Raises ValueError if it is not {name: (shape, torch dtype)}.
    """
    if not offers(dataset, "read_batch"):
        return None
    if not callable(getattr(dataset, "sample_spec", None)):
        raise ValueError(f"{type(dataset).__name__} has read_batch, but no sample_spec(): define both, or neither")
    spec = dataset.sample_spec()
    try:
        fields = {name: (tuple(map(int, shape)), dtype) for name, (shape, dtype) in spec.items()}
        if all(isinstance(dtype, torch.dtype) for _, dtype in fields.values()):
            return fields
    except (AttributeError, TypeError, ValueError):
        pass
    raise ValueError(
        f"{type(dataset).__name__}.sample_spec() returned {spec!r}: it should return each field's shape and torch "
        'dtype, such as {"image": ((32, 32, 3), torch.uint8), "label": ((), torch.int64)}'
    )


def batch_bytes(spec: Spec, rows: int) -> int:
    """Returns how many bytes a batch of `rows` samples of the spec takes in a slot."""
    return sum(align(dtype.itemsize * math.prod(shape) * rows, ALIGNMENT) for shape, dtype in spec.values())


class Stopping(BaseException):
    """Raised by `mark` to abandon a batch, because the worker has to exit."""


@dataclass
class Reading:
    """What a reader makes of a task. If it raises an error, `progress` counts nevertheless."""

    batch: Any = None
    skipped: list[tuple[Any, str]] = field(default_factory=list)  # (index, reason) of samples that are left out
    collate_seconds: float = 0.0
    progress: Progress | None = None  # of a stream


@dataclass(frozen=True)
class Reader:
    """Reads tasks from a dataset. Workers get it by fork or as a pickle.

    With a spec it calls the dataset's `read_batch`. With a seed alone it calls `__getitem__`, and before each call
    seeds the global generators from (seed, epoch, position, index). Where it must not seed them, because there is no
    seed or threads share them, it calls `__getitems__` if the dataset has that, else `__getitem__`.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool  # a task's indices are a batch's; False: a single sample's, without automatic batching
    seed: int | None
    spec: Spec | None  # of one sample, if the dataset offers read_batch and there is a seed
    skips: bool  # samples that raise are left out

    def read(
        self, task: Task, buffer: BatchBuffer, reading: Reading, mark: Mark = lambda row: None, seeds: bool = True
    ) -> None:
        """Reads the task's batch into `reading`. Its tensors are written into `buffer` where that is possible.

        `mark(row)` is called before each row that is read on its own. In a thread `seeds` must be False,
        because all threads share the global generators.
        Raises the dataset's error, or RuntimeError if the dataset raised StopIteration or no sample is left.
        """
        indices = None if self.spec is None else _as_integers(task.indices)
        try:
            if indices is not None:
                reading.batch = self._read_batch(task, indices, buffer, mark, reading.skipped)
                return
            samples = self._samples(task, mark, reading.skipped, seeds and self.seed is not None)
            began = time.perf_counter()
            reading.batch = buffer.collate(self.collate_fn, samples)
            reading.collate_seconds = time.perf_counter() - began
        except StopIteration as error:  # raised by next(), it would silently end the epoch
            raise RuntimeError(
                f"the dataset or collate_fn raised StopIteration while reading {task.indices}"
            ) from error

    def close(self) -> None:
        """Drops what is open, as a StreamReader has it: here nothing."""

    def _read_batch(
        self, task: Task, indices: np.ndarray, buffer: BatchBuffer, mark: Mark, skipped: list[tuple[Any, str]]
    ) -> dict[str, Any]:
        assert self.spec is not None
        out = {name: buffer.empty((len(indices), *shape), dtype) for name, (shape, dtype) in self.spec.items()}
        if not task.singly:
            try:
                return out | self._write(task.random_key(), indices, out)
            except Exception:
                if not self.skips:
                    raise
        added: list[dict[str, Any]] = []  # by the rows that could be read, which are moved together

        def write(row: int) -> None:
            one, good = slice(row, row + 1), len(added)
            target = {name: tensor[good : good + 1] for name, tensor in out.items()}
            added.append(self._write(task.random_key(one), indices[one], target))

        self._one_by_one(task, indices.tolist(), write, mark, skipped)
        joined = {name: reduce(add, (fields[name] for fields in added)) for name in added[0]}
        return {name: tensor[: len(added)] for name, tensor in out.items()} | joined

    def _one_by_one(
        self, task: Task, indices: Any, read: Callable[[int], None], mark: Mark, skipped: list[tuple[Any, str]]
    ) -> None:
        """Calls read(row) for each of the task's rows. Raises RuntimeError if all of them are left out."""
        for row, index in enumerate(indices):
            if row in task.without:
                continue
            mark(row)
            try:
                read(row)
            except Exception as error:
                if not self.skips:
                    raise
                skipped.append((index, f"{type(error).__name__}: {error}"))
        if len(indices) == len(skipped) + len(task.without) > 0:
            reasons = "; ".join(f"sample {index}: {reason}" for index, reason in skipped[:3])
            raise RuntimeError(
                f"on_error='skip' has left out every sample of a batch ({reasons or 'reading them crashes workers'})"
            )

    def _write(self, key: tuple[Any, Any], indices: np.ndarray, out: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Calls read_batch, which writes into `out`. Returns the fields that it added, which are not in the spec."""

        def write() -> dict[str, Any]:
            assert self.seed is not None
            given: dict[str, Any] = dict(out)
            self.dataset.read_batch(indices, given, Random(self.seed, *key, indices))
            for name, value in given.items():
                if value is not out.get(name) and (name in out or isinstance(value, (torch.Tensor, np.ndarray))):
                    raise ValueError(
                        f"read_batch has replaced out[{name!r}]: write into the existing tensor, for example "
                        f"out[{name!r}][:] = ...; the fields of sample_spec() are {', '.join(out)}"
                    )
            return {name: value for name, value in given.items() if name not in out}

        if os.environ.get("LOADERS_DEBUG") == "1":
            _find_unwritten(write, len(indices), out)
        return write()

    def _samples(self, task: Task, mark: Mark, skipped: list[tuple[Any, str]], seeded: bool) -> Any:
        if not self.batched:
            if seeded:
                seed_globals(self._keys(task, [task.indices])[0])
            return self.dataset[task.indices]
        if not seeded and getattr(self.dataset, "__getitems__", None) and not task.singly:
            try:
                return self.dataset.__getitems__(task.indices)
            except Exception:
                if not self.skips:
                    raise
        dataset, keys = self.dataset, self._keys(task, task.indices) if seeded else None
        lacks_getitem = _owner(dataset, "__getitem__") in (None, Dataset) and getattr(dataset, "__getitems__", None)
        indices, samples = list(task.indices), list[Any]()

        def read(row: int) -> None:
            if keys is not None:
                seed_globals(keys[row])
            index = indices[row]
            samples.append(dataset.__getitems__([index])[0] if lacks_getitem else dataset[index])

        self._one_by_one(task, indices, read, mark, skipped)
        return samples

    def _keys(self, task: Task, indices: Sequence[Any]) -> list[int]:
        """Returns the seed of each row's global generators."""
        numbers = _as_integers(indices)
        if numbers is None:  # strings or tuples, for example: the position alone distinguishes the samples
            numbers = np.zeros(len(indices), dtype=np.int64)
        assert self.seed is not None
        keys: list[int] = fold(self.seed, *task.random_key(), numbers).tolist()
        return keys


def _find_unwritten(write: Callable[[], Any], rows: int, out: dict[str, torch.Tensor]) -> None:
    """Raises ValueError if `write` leaves rows of `out` unwritten: see DEBUG_FILLS."""
    fields = {name: _bytes(tensor) for name, tensor in out.items() if tensor.numel()}
    unwritten = {name: torch.ones(rows, dtype=torch.bool, device="cpu") for name in fields}
    for fill in DEBUG_FILLS:
        for memory in fields.values():
            memory.fill_(fill)
        write()
        for name, memory in fields.items():
            unwritten[name] &= (memory == fill).all(dim=1)
    for name, missing in unwritten.items():
        if missing.any():
            where = ", ".join(map(str, missing.nonzero().flatten().tolist()))
            raise ValueError(f"read_batch has not written out[{name!r}] in row {where} (rows are 0 to {rows - 1})")


@cache
def warn_of_unseeded_reading() -> None:
    log.warning(
        "samples are read in a thread, where the loader does not seed the global generators, as the model draws "
        "from them too: random augmentation differs from run to run, unless the dataset has read_batch or worker "
        "processes read it"
    )


def _as_integers(indices: Sequence[Any]) -> np.ndarray | None:
    """Returns the indices as int64 (rows,), or None if they are not integers."""
    try:
        numbers = np.asarray(indices)
    except (TypeError, ValueError):
        return None
    if numbers.ndim != 1 or not (numbers.size == 0 or np.issubdtype(numbers.dtype, np.integer)):
        return None
    return numbers.astype(np.int64, copy=False)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a batch's tensor viewed as bytes (rows, n)."""
    return tensor.view(len(tensor), -1).view(torch.uint8)
