"""What a worker does with a task, in whatever process or thread it runs: indices in, a batch in a slot out.

A batch goes back as a pickle in which each tensor is only a reference to its place in shared memory: a few hundred
bytes, whatever the nest around the tensors. What finds no room in the slot lies in memory of the batch's own, and the
size that would have been needed goes along, so that later slots have room. Only odd tensors (sparse, nested,
quantized, with gradients) travel inside the pickle.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate, default_collate_fn_map

from loaders.randomness import Random, fold, seed_globals
from loaders.slots import align

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]

# A tensor in a pickle: offset, dtype, shape, stride. An offset n >= 0 is in the slot, -1 - n is n in the overflow.
Reference = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


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

    def read(self, task: Task, room: Room, seeded: bool = True) -> Any:
        """The batch, as far as possible in the memory of `room`; not `seeded`: the global generators are let be."""
        if self.spec is not None:
            return self._read_batch(task, room)
        samples = self._samples(task, seeded and self.seed is not None)
        if self.collate_fn is default_collate:
            return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: room.stack})
        return self.collate_fn(samples)

    def _read_batch(self, task: Task, room: Room) -> dict[str, torch.Tensor]:
        indices = np.asarray(task.indices, dtype=np.int64)
        out = {name: room.empty((len(indices), *shape), dtype) for name, (shape, dtype) in self.spec.items()}
        self.dataset.read_batch(indices, out, Random(self.seed, task.epoch, task.positions, indices))
        return out

    def _samples(self, task: Task, seeded: bool) -> Any:
        if not self.batched:
            if seeded:
                seed_globals(self._keys(task, [task.indices])[0])
            return self.dataset[task.indices]
        if not seeded:
            if getattr(self.dataset, "__getitems__", None):
                return self.dataset.__getitems__(task.indices)
            return [self.dataset[index] for index in task.indices]
        samples = []
        for index, key in zip(task.indices, self._keys(task, task.indices), strict=True):
            seed_globals(key)
            samples.append(self.dataset[index])
        return samples

    def _keys(self, task: Task, indices: Sequence[Any]) -> list[int]:
        try:
            numbers = np.asarray(indices, dtype=np.int64)
        except (TypeError, ValueError):  # a sampler of names, say: the position tells samples apart as well
            numbers = np.zeros(len(indices), dtype=np.int64)
        return fold(self.seed, task.epoch, task.positions, numbers).tolist()


class Room:
    """The memory for one batch: a slot's, and where that is too small, memory of the batch's own behind it.

    Tensors are placed one after the other; what the first batch took tells the size of later slots.
    """

    def __init__(self, slot: np.ndarray | None) -> None:
        self._areas = [] if slot is None else [(0, torch.from_numpy(slot))]
        self._room = 0 if slot is None else slot.size
        self.needed = 0  # bytes of the whole batch, whether the slot had room for them or not
        self.is_pickled = False  # whether a tensor had to travel inside the pickle
        self.overflow_fd: int | None = None
        self._overflow_end = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        size = dtype.itemsize * math.prod(shape)
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        start, self.needed = self.needed, self.needed + align(size)
        if start + size > self._room:
            self._room = 0  # once one has not fitted the others follow it, so that the order of places stays simple
            memory = self._overflow(size)
        else:
            memory = self._areas[0][1][start : start + size]
        return memory.view(dtype).view(shape)

    def close(self) -> None:
        if self.overflow_fd is not None:
            os.close(self.overflow_fd)

    def _overflow(self, size: int) -> torch.Tensor:
        """`size` bytes at the end of a memfd that only this batch has."""
        if self.overflow_fd is None:
            self.overflow_fd = os.memfd_create("loader-batch", os.MFD_CLOEXEC)
        start, self._overflow_end = self._overflow_end, self._overflow_end + align(size, mmap.ALLOCATIONGRANULARITY)
        os.posix_fallocate(self.overflow_fd, start, self._overflow_end - start)
        area = mmap.mmap(self.overflow_fd, self._overflow_end - start, offset=start)
        memory = torch.from_numpy(np.frombuffer(area, np.uint8))
        self._areas.append((-1 - start, memory))  # below zero: see Reference
        return memory[:size]

    def stack(self, samples: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """torch.stack into the slot: what default_collate does with tensors."""
        first = samples[0]
        plain = type(first) is torch.Tensor and first.layout == torch.strided and first.device.type == "cpu"
        if not plain or first.is_nested or first.requires_grad or not first.numel():
            return default_collate_fn_map[torch.Tensor](samples, collate_fn_map=collate_fn_map)
        return torch.stack(tuple(samples), out=self.empty((len(samples), *first.shape), first.dtype))

    def place(self, tensor: torch.Tensor) -> Reference | None:
        """Where the tensor lies, copied there if it did not; None if it has to be pickled as it is."""
        odd = tensor.layout != torch.strided or tensor.is_nested or tensor.requires_grad or tensor.is_quantized
        if tensor.is_cuda:
            raise TypeError("a worker made a CUDA tensor: make CPU tensors there, the loader's user moves them")
        if odd or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
            self.is_pickled |= bool(odd)
            return None
        if (offset := self._find(tensor)) is None:
            tensor = tensor if _is_dense(tensor) else tensor.contiguous()
            flat = self.empty((tensor.numel(),), tensor.dtype)
            torch.as_strided(flat, tensor.size(), tensor.stride()).copy_(tensor)
            offset = self._find(flat)
        return offset, tensor.dtype, tuple(tensor.size()), tensor.stride()

    def _find(self, tensor: torch.Tensor) -> int | None:
        address = tensor.data_ptr()
        for start, memory in self._areas:
            distance = address - memory.data_ptr()
            if 0 <= distance < memory.numel():
                return start + distance if start >= 0 else start - distance
        return None


def dump(batch: Any, room: Room) -> bytes:
    """Pickles a batch, with references in place of the tensors that `room` takes."""
    buffer = io.BytesIO()
    _BatchPickler(buffer, room).dump(batch)
    return buffer.getvalue()


def load(pickled: bytes, slot: Callable[[], torch.Tensor], overflow_fd: int | None) -> Any:
    """The batch, its references made tensors on `slot()`, uint8 (capacity,), called once, or on the overflow."""
    return _BatchUnpickler(io.BytesIO(pickled), slot, overflow_fd).load()


class _BatchPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, room: Room) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._room = room

    def persistent_id(self, item: Any) -> tuple[Any, ...] | None:
        return self._room.place(item) if type(item) is torch.Tensor else None


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, slot: Callable[[], torch.Tensor], overflow_fd: int | None) -> None:
        super().__init__(buffer)
        self._map_slot, self._overflow_fd = slot, overflow_fd
        self._slot: torch.Tensor | None = None
        self._overflow: torch.Tensor | None = None

    def persistent_load(self, reference: Reference) -> torch.Tensor:
        offset, dtype, shape, stride = reference
        if offset >= 0:
            memory = self._slot = self._map_slot() if self._slot is None else self._slot
        else:
            memory = self._overflow = _mapped(self._overflow_fd) if self._overflow is None else self._overflow
            offset = -1 - offset
        size = dtype.itemsize * math.prod(shape)
        return torch.as_strided(memory[offset : offset + size].view(dtype), shape, stride)


def _mapped(fd: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(fd, 0), np.uint8))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
