"""The memory that a worker writes one batch into: a slot, and extra memory if the slot is too small.

Each tensor has a storage of exactly its own size, so that torch.save and copy.deepcopy of one tensor copy no others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from ..nested import is_dense
from .shared_memory import Mapping, align, create_shared_memory, full_machine_explained, page_aligned

ALIGNMENT = 64
# Tensors smaller than this share of their batch are cloned, so that keeping the labels does not keep the images.
SMALL = 1 / 4

# Where a tensor lies: offset, dtype, shape, stride. An offset n >= 0 is in the slot; -1 - n means n in the overflow.
Reference = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class BatchBuffer:
    """A slot's bytes, uint8 (capacity,), and the process's own memory for tensors that do not fit there.

    Tensors are placed one after the other. `needed` counts the bytes of the whole batch: how large a slot should be.
    """

    def __init__(self, slot: np.ndarray | None = None) -> None:
        self._slot = np.empty(0, np.uint8) if slot is None else slot
        self.needed = 0
        self.overflowed = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised CPU tensor."""
        size = dtype.itemsize * math.prod(shape)
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        start, self.needed = self.needed, self.needed + align(size, ALIGNMENT)
        if start + size <= len(self._slot):
            return tensor_at(self._slot, start, dtype, shape)
        self.overflowed = True  # later tensors overflow too, as `needed` only grows
        return self._overflow(size, shape, dtype)

    def stack(self, samples: Sequence[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
        """Stacks tensors as default_collate does, but into the buffer."""
        first = samples[0]
        if not is_plain(first):
            stacked: torch.Tensor = collate_tensor_fn(samples)
            return stacked
        if not first.numel() or any(sample.dtype != first.dtype for sample in samples):
            return torch.stack(tuple(samples))  # mixed dtypes are promoted
        return torch.stack(tuple(samples), out=self.empty((len(samples), *first.shape), first.dtype))

    def owned(self, tensor: Any) -> Any:
        """Returns a copy of a small tensor that lies in this buffer; anything else as it is."""
        return tensor.clone() if self._holds(tensor) and tensor.nbytes < SMALL * self.needed else tensor

    def _holds(self, tensor: Any) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return False
        return 0 <= tensor.data_ptr() - self._slot.ctypes.data < len(self._slot)

    def _overflow(self, size: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


class SharedBatchBuffer(BatchBuffer):
    """A buffer that another process reads. What does not fit into the slot goes into new shared memory."""

    def __init__(self, slot: np.ndarray | None = None) -> None:
        super().__init__(slot)
        self.is_pickled = False  # an unusual tensor (sparse, nested, ...) is sent inside the pickle
        self.overflow_fd: int | None = None
        self._overflow_end = 0
        self._areas: list[tuple[int, np.ndarray]] = [(0, self._slot)]
        # By id, so that a tensor that occurs twice is sent once.
        self._placed: dict[int, tuple[torch.Tensor, Reference]] = {}

    def place(self, tensor: torch.Tensor) -> Reference | None:
        """Returns where in the buffer the tensor lies, after copying it there if needed; None: it must be pickled.

        Raises TypeError for a CUDA tensor.
        """
        if tensor.is_cuda:
            raise TypeError(
                "a worker made a CUDA tensor: make CPU tensors there, and move the batch in the main process"
            )
        odd = tensor.layout != torch.strided or tensor.is_nested or tensor.requires_grad or tensor.is_quantized
        if odd or tensor.is_conj() or tensor.is_neg() or tensor.device.type != "cpu" or not tensor.numel():
            self.is_pickled |= bool(odd)
            return None
        if id(tensor) not in self._placed:
            self._placed[id(tensor)] = tensor, self._refer(tensor)
        return self._placed[id(tensor)][1]

    def close(self) -> None:
        """Closes this process's descriptor of the overflow."""
        if self.overflow_fd is not None:
            os.close(self.overflow_fd)

    def _refer(self, tensor: torch.Tensor) -> Reference:
        offset = self._find(tensor)
        if offset is None:
            tensor = tensor if is_dense(tensor) else tensor.contiguous()
            flat = self.empty((tensor.numel(),), tensor.dtype)
            torch.as_strided(flat, tensor.size(), tensor.stride()).copy_(tensor)
            offset = self._find(flat)
            assert offset is not None
        return offset, tensor.dtype, tuple(tensor.size()), tensor.stride()

    def _overflow(self, size: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        start, self._overflow_end = self._overflow_end, self._overflow_end + page_aligned(size)
        with full_machine_explained(f"providing {size:,} bytes for a batch"):
            if self.overflow_fd is None:
                self.overflow_fd = create_shared_memory(0)
            area = Mapping(self.overflow_fd, start, self._overflow_end - start, provide=True).array()
        self._areas.append((-1 - start, area))  # below zero: see Reference
        return tensor_at(area, 0, dtype, shape)

    def _find(self, tensor: torch.Tensor) -> int | None:
        """Returns the offset (see Reference) of a tensor that lies in the buffer, else None."""
        address = tensor.data_ptr()
        for start, area in self._areas:
            distance = address - area.ctypes.data
            if 0 <= distance < len(area):
                return start + distance if start >= 0 else start - distance
        return None


def tensor_at(memory: np.ndarray, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Returns a tensor in `memory` (uint8). It keeps the array alive, and its storage has exactly its size."""
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(tuple(shape))


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is nothing but strided CPU memory, as torchvision's tv_tensors are too."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout != torch.strided:
        return False
    return tensor.device.type == "cpu" and not (tensor.is_nested or tensor.requires_grad or tensor.is_quantized)


def stacks_as_torch_does() -> bool:
    """Returns whether default_collate stacks tensors with torch's function, which users may replace in its map."""
    return default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
