"""How a batch comes from a worker process: its tensors in shared memory, all else in a pickle that refers to them.

A reference to a tensor takes a few bytes, so a batch's pickle takes a few hundred, whatever the nest around the
tensors. What finds no room in the slot lies in memory of the batch's own, sent along as a descriptor, and the size
that would have been needed tells how large later slots must be. Only odd tensors (sparse, nested, quantized, with
gradients) travel inside the pickle.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from loaders.batch import is_dense
from loaders.reading import Room
from loaders.slots import align, full_machine_explained

# A tensor in a pickle: offset, dtype, shape, stride. An offset n >= 0 is in the slot, -1 - n is n in the overflow.
Reference = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class SharedRoom(Room):
    """Room for a batch in a slot that another process reads, and where that is too small, in a memfd behind it."""

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        super().__init__(memory)
        self.is_pickled = False  # whether a tensor had to travel inside the pickle
        self.overflow_fd: int | None = None
        self._overflow_end = 0
        self._areas = [(0, self._memory)]
        self._placed: dict[int, tuple[torch.Tensor, Reference]] = {}  # by id: one that occurs twice stays one

    def place(self, tensor: torch.Tensor) -> Reference | None:
        """Where the tensor lies, copied there if it did not; None if it has to be pickled as it is."""
        odd = tensor.layout != torch.strided or tensor.is_nested or tensor.requires_grad or tensor.is_quantized
        if tensor.is_cuda:
            raise TypeError("a worker made a CUDA tensor: make CPU tensors there, the loader's user moves them")
        if odd or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
            self.is_pickled |= bool(odd)
            return None
        if id(tensor) not in self._placed:
            self._placed[id(tensor)] = tensor, self._refer(tensor)
        return self._placed[id(tensor)][1]

    def close(self) -> None:
        if self.overflow_fd is not None:
            os.close(self.overflow_fd)

    def _refer(self, tensor: torch.Tensor) -> Reference:
        if (offset := self._find(tensor)) is None:
            tensor = tensor if is_dense(tensor) else tensor.contiguous()
            flat = self.empty((tensor.numel(),), tensor.dtype)
            torch.as_strided(flat, tensor.size(), tensor.stride()).copy_(tensor)
            offset = self._find(flat)
        return offset, tensor.dtype, tuple(tensor.size()), tensor.stride()

    def _overflow(self, size: int) -> torch.Tensor:
        """`size` bytes at the end of a memfd that only this batch has."""
        with full_machine_explained(f"providing {size:,} bytes for a batch"):
            if self.overflow_fd is None:
                self.overflow_fd = os.memfd_create("loader-batch", os.MFD_CLOEXEC)
            start, self._overflow_end = (
                self._overflow_end,
                self._overflow_end + align(size, mmap.ALLOCATIONGRANULARITY),
            )
            os.posix_fallocate(self.overflow_fd, start, self._overflow_end - start)
            area = mmap.mmap(self.overflow_fd, self._overflow_end - start, offset=start)
        memory = torch.from_numpy(np.frombuffer(area, np.uint8))
        self._areas.append((-1 - start, memory))  # below zero: see Reference
        return memory[:size]

    def _find(self, tensor: torch.Tensor) -> int | None:
        address = tensor.data_ptr()
        for start, memory in self._areas:
            distance = address - memory.data_ptr()
            if 0 <= distance < memory.numel():
                return start + distance if start >= 0 else start - distance
        return None


def dump(batch: Any, room: SharedRoom) -> bytes:
    """Pickles a batch, with references in place of the tensors that `room` takes."""
    buffer = io.BytesIO()
    _BatchPickler(buffer, room).dump(batch)
    return buffer.getvalue()


def load(pickled: bytes, slot: Callable[[], torch.Tensor], overflow_fd: int | None) -> Any:
    """The batch, its references made tensors on `slot()`, uint8 (capacity,), called once, or on the overflow."""
    return _BatchUnpickler(io.BytesIO(pickled), slot, overflow_fd).load()


class _BatchPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, room: SharedRoom) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._room = room

    def persistent_id(self, item: Any) -> Reference | None:
        return self._room.place(item) if type(item) is torch.Tensor else None


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, slot: Callable[[], torch.Tensor], overflow_fd: int | None) -> None:
        super().__init__(buffer)
        self._map_slot, self._overflow_fd = slot, overflow_fd
        self._slot: torch.Tensor | None = None
        self._overflow: torch.Tensor | None = None
        self._tensors: dict[Reference, torch.Tensor] = {}

    def persistent_load(self, reference: Reference) -> torch.Tensor:
        if reference not in self._tensors:
            self._tensors[reference] = self._view(*reference)
        return self._tensors[reference]

    def _view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        if offset >= 0:
            memory = self._slot = self._map_slot() if self._slot is None else self._slot
        else:
            memory = self._overflow = _mapped(self._overflow_fd) if self._overflow is None else self._overflow
            offset = -1 - offset
        size = dtype.itemsize * math.prod(shape)
        return torch.as_strided(memory[offset : offset + size].view(dtype), shape, stride)


def _mapped(fd: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(fd, 0), np.uint8))
