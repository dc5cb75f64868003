"""What a worker does with a task, in whatever process or thread it runs: indices in, a batch in a slot out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate, default_collate_fn_map

from loaders.randomness import Random, fold, seed_globals
from loaders.slots import align

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]

# With LOADERS_DEBUG=1 each batch is read twice more, over memory filled in two ways, to find rows left unwritten.
DEBUG_FILLS = (0xA5, 0x5A)


def spec_of(dataset: Any) -> Spec:
    """What `sample_spec()` says. Raises ValueError where it does not say {name: (shape, torch dtype)}."""
    spec = dataset.sample_spec()
    try:
        fields = {name: (tuple(map(int, shape)), dtype) for name, (shape, dtype) in spec.items()}
        if all(isinstance(dtype, torch.dtype) for _, dtype in fields.values()):
            return fields
    except (AttributeError, TypeError, ValueError):
        pass
    raise ValueError(
        f"{type(dataset).__name__}.sample_spec() gave {spec!r}: it should give each field's shape and torch dtype, "
        'such as {"image": ((32, 32, 3), torch.uint8), "label": ((), torch.int64)}'
    )


def batch_bytes(spec: Spec, rows: int) -> int:
    """The bytes that a batch of the spec takes in a slot."""
    return sum(align(dtype.itemsize * math.prod(shape) * rows) for shape, dtype in spec.values())


@dataclass(frozen=True)
class Task:
    """A batch to read; without a seed it has indices only, and its random numbers are the worker's own."""

    indices: Any  # a sequence of dataset indices, or without automatic batching a single one
    epoch: int | None = None
    number: int | None = None  # of the batch in its epoch
    positions: np.ndarray | None = None  # of its rows in the epoch, int64
    singly: bool = False  # to be read sample by sample: a worker has died of the whole
    without: frozenset[int] = frozenset()  # rows to leave out: workers have died of them


@dataclass
class Reading:
    """A batch that was read, and the samples that had to be left out of it: (index, what went wrong)."""

    batch: Any = None
    skipped: list[tuple[Any, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Reader:
    """Reads tasks from a dataset; carried to the workers by fork or pickle.

    With a seed, a dataset's `read_batch` is used if it has one, and else the global generators are seeded for each
    sample from (seed, epoch, position, index).
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    seed: int | None
    spec: Spec | None  # of one sample, where the dataset has read_batch and it is to be used
    skips: bool  # leaves out samples that raise

    def read(
        self, task: Task, room: Room, mark: Callable[[int], None] = lambda row: None, seeded: bool = True
    ) -> Reading:
        """The batch, as far as possible in the memory of `room`.

        `mark(row)` is told which row of the batch is read next. Not `seeded`: the global generators are let be.
        """
        reading = Reading()
        if self.spec is not None:
            reading.batch = self._read_batch(task, room, mark, reading.skipped)
            return reading
        samples = self._samples(task, mark, reading.skipped, seeded and self.seed is not None)
        if self.collate_fn is default_collate:
            reading.batch = collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: room.stack})
        else:
            reading.batch = self.collate_fn(samples)
        return reading

    def _read_batch(self, task: Task, room: Room, mark: Callable[[int], None], skipped: list) -> dict[str, Any]:
        indices, positions = np.asarray(task.indices, dtype=np.int64), task.positions
        out = {name: room.empty((len(indices), *shape), dtype) for name, (shape, dtype) in self.spec.items()}
        keys = (self.seed, task.epoch, positions, indices)
        if not task.singly:
            try:
                self._write(indices, out, keys)
                return out
            except Exception:
                if not self.skips:
                    raise
        good = 0
        for row in sorted(set(range(len(indices))) - task.without):
            mark(row)
            one = slice(row, row + 1)
            place = {name: tensor[good : good + 1] for name, tensor in out.items()}
            try:
                self._write(indices[one], place, (self.seed, task.epoch, positions[one], indices[one]))
                good += 1
            except Exception as error:
                if not self.skips:
                    raise
                skipped.append((int(indices[row]), f"{type(error).__name__}: {error}"))
        if not good:
            raise _nothing_left(skipped)
        return {name: tensor[:good] for name, tensor in out.items()}

    def _write(self, indices: np.ndarray, out: dict[str, torch.Tensor], keys: Any) -> None:
        if os.environ.get("LOADERS_DEBUG") == "1":
            self._find_unwritten(indices, out, keys)
        self._call(indices, out, keys)

    def _call(self, indices: np.ndarray, out: dict[str, torch.Tensor], keys: Any) -> None:
        """Calls read_batch, and checks that it has written into what it was given."""
        given = dict(out)
        self.dataset.read_batch(indices, given, Random(*keys))
        for name, tensor in given.items():
            if tensor is not out.get(name):
                raise ValueError(
                    f"read_batch has put something of its own under out[{name!r}]: write into the tensor that is "
                    f"there, as by out[{name!r}][:] = ...; sample_spec() has {', '.join(out)}"
                )

    def _find_unwritten(self, indices: np.ndarray, out: dict[str, torch.Tensor], keys: Any) -> None:
        fields = {name: _bytes(tensor) for name, tensor in out.items() if tensor.numel()}
        unwritten = {name: torch.ones(len(indices), dtype=torch.bool) for name in fields}
        for fill in DEBUG_FILLS:
            for row in fields.values():
                row.fill_(fill)
            self._call(indices, out, keys)
            for name, row in fields.items():
                unwritten[name] &= (row == fill).all(dim=1)
        for name, rows in unwritten.items():
            if rows.any():
                where = ", ".join(map(str, rows.nonzero().flatten().tolist()))
                raise ValueError(f"read_batch has not written out[{name!r}] in row {where} of {len(indices)}")

    def _samples(self, task: Task, mark: Callable[[int], None], skipped: list, seeded: bool) -> Any:
        if not self.batched:
            if seeded:
                seed_globals(self._keys(task, [task.indices])[0])
            return self.dataset[task.indices]
        read = partial(getitem, self.dataset)
        if not seeded and getattr(self.dataset, "__getitems__", None):
            read = self._read_one
            if not task.singly:
                try:
                    return self.dataset.__getitems__(task.indices)
                except Exception:
                    if not self.skips:
                        raise
        keys = self._keys(task, task.indices) if seeded else None
        samples = []
        for row, index in enumerate(task.indices):
            if row in task.without:
                continue
            mark(row)
            try:
                if keys is not None:
                    seed_globals(keys[row])
                samples.append(read(index))
            except Exception as error:
                if not self.skips:
                    raise
                skipped.append((index, f"{type(error).__name__}: {error}"))
        if not samples and (skipped or task.without):
            raise _nothing_left(skipped)
        return samples

    def _read_one(self, index: Any) -> Any:
        return self.dataset.__getitems__([index])[0]

    def _keys(self, task: Task, indices: Sequence[Any]) -> list[int]:
        try:
            numbers = np.asarray(indices, dtype=np.int64)
        except (TypeError, ValueError):  # a sampler of names, say: the position tells samples apart as well
            numbers = np.zeros(len(indices), dtype=np.int64)
        return fold(self.seed, task.epoch, task.positions, numbers).tolist()


class Room:
    """The memory for one batch: a slot's, and where that is too small, the heap.

    Tensors are placed one after the other; what the first batch took tells the size of later slots.
    """

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8) if memory is None else memory
        self.needed = 0  # bytes of the whole batch, whether the slot had room for them or not
        self.overflowed = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        size = dtype.itemsize * math.prod(shape)
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        start, self.needed = self.needed, self.needed + align(size)
        if not self.overflowed and start + size <= len(self._memory):
            memory = self._memory[start : start + size]
        else:
            self.overflowed = True  # once one has not fitted the others follow it: the order of places stays simple
            memory = self._overflow(size)
        return memory.view(dtype).view(shape)

    def stack(self, samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """torch.stack into the slot: what default_collate does with tensors."""
        first = samples[0]
        plain = type(first) is torch.Tensor and first.layout == torch.strided and first.device.type == "cpu"
        if not plain or first.is_nested or first.requires_grad or not first.numel():
            return default_collate_fn_map[torch.Tensor](samples, collate_fn_map=collate_fn_map)
        return torch.stack(tuple(samples), out=self.empty((len(samples), *first.shape), first.dtype))

    def _overflow(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of rows, as bytes (rows, n)."""
    return tensor.view(len(tensor), -1).view(torch.uint8)


def _nothing_left(skipped: list[tuple[Any, str]]) -> RuntimeError:
    reasons = "; ".join(f"sample {index}: {reason}" for index, reason in skipped[:3]) or "workers die of them"
    return RuntimeError(f"on_error='skip' has left out every sample of a batch ({reasons})")
