"""The memory that a worker makes one batch in: a slot, or new memory for tensors that do not fit there.

Each tensor has a storage of exactly its own size, so that torch.save and copy.deepcopy of one tensor copy no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate, default_collate_fn_map

from .shared_memory import align

ALIGNMENT = 64
# Memory smaller than this share of its batch is delivered as a copy, so that keeping the labels does not keep the
# images.
SMALL = 1 / 4


class BatchBuffer:
    """A slot's bytes, uint8 (capacity,), in which tensors are placed one after the other.

    `needed` counts the bytes of the whole batch: how large a slot should be.
    """

    def __init__(self, slot: np.ndarray | None = None) -> None:
        self.slot = np.empty(0, np.uint8) if slot is None else slot
        self._end = 0  # of the tensors in the slot
        self._outside = 0  # bytes that did not fit

    @property
    def needed(self) -> int:
        return self._end + self._outside

    @property
    def overflowed(self) -> bool:
        return self.needed > len(self.slot)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised CPU tensor."""
        start = self.place(dtype.itemsize * math.prod(shape))
        if start is None:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.frombuffer(self.slot, dtype=dtype, count=math.prod(shape), offset=start).view(tuple(shape))

    def place(self, size: int) -> int | None:
        """Reserves `size` bytes of the slot, and returns their offset; None if there is no room for them."""
        if size and self._end + size <= len(self.slot):
            start, self._end = self._end, self._end + align(size, ALIGNMENT)
            return start
        self._outside += align(size, ALIGNMENT)
        return None

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Returns collate_fn(samples)."""
        return collate_fn(samples)

    def stack(self, samples: Sequence[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
        """Stacks tensors as default_collate does in a worker, but into the buffer."""
        first = samples[0]
        if set(map(type, samples)) == {torch.Tensor} and is_plain(first) and first.numel():
            dtype = first.dtype
            if all(sample.dtype == dtype for sample in samples):
                try:
                    return torch.stack(tuple(samples), out=self.empty((len(samples), *first.shape), dtype))
                except RuntimeError:
                    pass  # mixed shapes, for example: torch's own function raises its own error
        stacked: torch.Tensor = collate_tensor_fn(samples)
        return stacked


class ThreadBuffer(BatchBuffer):
    """A buffer whose tensors the consumer gets as they are, so small ones get memory of their own at once."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize * math.prod(shape)
        if size >= SMALL * len(self.slot):
            return super().empty(shape, dtype)
        self._outside += align(size, ALIGNMENT)
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Returns collate_fn(samples); default_collate stacks into the buffer."""
        if collate_fn is not default_collate or not stacks_as_torch_does():
            return collate_fn(samples)
        return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self.stack})


class WorkerBuffer(BatchBuffer):
    """A buffer of a worker process, where any collate_fn that calls default_collate stacks into the buffer."""

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Returns collate_fn(samples). In this thread alone, default_collate stacks into the buffer meanwhile."""
        if not stacks_as_torch_does():
            return collate_fn(samples)
        thread = get_ident()

        def stack(samples: Sequence[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
            stacked: torch.Tensor = self.stack(samples) if get_ident() == thread else collate_tensor_fn(samples)
            return stacked

        default_collate_fn_map[torch.Tensor] = stack
        try:
            return collate_fn(samples)
        finally:
            default_collate_fn_map[torch.Tensor] = collate_tensor_fn


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is nothing but strided CPU memory, as torchvision's tv_tensors are too."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout != torch.strided:
        return False
    if tensor.device.type != "cpu" or tensor.is_nested or tensor.requires_grad or tensor.is_quantized:
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def stacks_as_torch_does() -> bool:
    """Returns whether default_collate stacks tensors with torch's function, which users may replace in its map."""
    return default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
