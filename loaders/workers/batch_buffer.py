"""The memory that a worker makes one batch in: a slot, or new memory for tensors that do not fit there.

Each tensor has a storage of exactly its own size, so that torch.save and copy.deepcopy of one tensor copy no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate, default_collate_fn_map

from ..preload.accelerator import is_page_locked
from .shared_memory import align

ALIGNMENT = 64
# Memory smaller than this share of its batch is delivered as a copy, so that keeping the labels does not keep the
# images.
SMALL = 1 / 4

Samples = list[torch.Tensor] | tuple[torch.Tensor, ...]

# The dtypes that torch's workers can collate.
SHAREABLE = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
}


class BatchBuffer:
    """A slot's bytes, uint8 (capacity,), in which tensors are placed one after the other.

    The consumer gets the tensors as they are, so small ones get memory of their own at once. `needed` counts the bytes
    of the whole batch: how large a slot should be.
    """

    small: float = SMALL

    def __init__(self, slot: np.ndarray | None = None) -> None:
        self.slot = np.empty(0, np.uint8) if slot is None else slot
        self._end = 0  # of the tensors in the slot
        self.outside = 0  # bytes that lie elsewhere
        self.missed: dict[int, int] = {}  # those of `empty`, by address
        if is_page_locked(self.slot):
            self.small = 0  # for a Preloader, which drops the host batch once it is copied

    @property
    def needed(self) -> int:
        return self._end + self.outside

    @property
    def overflowed(self) -> bool:
        return self.needed > len(self.slot)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised CPU tensor."""
        count = math.prod(shape)
        size = dtype.itemsize * count
        start = self.place(size, small=self.small)
        if start is None:
            made = torch.empty(tuple(shape), dtype=dtype, device="cpu")
            self.missed[made.data_ptr()] = align(size, ALIGNMENT)
            return made
        return torch.frombuffer(self.slot, dtype=dtype, count=count, offset=start).view(tuple(shape))

    def place(self, size: int, small: float = 0) -> int | None:
        """Reserves `size` bytes of the slot, and returns their offset.

        None: there is no room for them, or they are less than the share `small` of the slot.
        """
        if size and self._end + size <= len(self.slot) and size >= small * len(self.slot):
            start, self._end = self._end, self._end + align(size, ALIGNMENT)
            return start
        self.outside += align(size, ALIGNMENT)
        return None

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Returns collate_fn(samples); default_collate stacks into the buffer."""
        if collate_fn is not default_collate or not stacks_as_torch_does():
            return collate_fn(samples)
        return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self.stack})

    def stack(self, samples: Samples, *, collate_fn_map: object = None) -> torch.Tensor:
        """Stacks tensors as default_collate does without workers, but into the buffer, where that is possible."""
        first = samples[0]
        if set(map(type, samples)) == {torch.Tensor} and is_plain(first) and first.numel():
            is_plain_format = first.dim() < 4 or first.is_contiguous()  # else perhaps channels-last
            if is_plain_format and all(sample.dtype == first.dtype for sample in samples):
                with suppress(RuntimeError):  # for mixed shapes, for example: below the same error comes
                    return torch.stack(samples, out=self.empty((len(samples), *first.shape), first.dtype))
        if first.is_nested or first.layout != torch.strided:
            refused: torch.Tensor = collate_tensor_fn(samples)
            return refused
        return torch.stack(samples)  # in a worker, torch's own function needs /dev/shm


class WorkerBuffer(BatchBuffer):
    """A buffer of a worker process, where any collate_fn that calls default_collate stacks into the buffer.

    Small tensors lie in the slot, too: the main process copies them. as_torch: it also raises what default_collate
    raises in a worker of torch's, though it could stack the samples.
    """

    small = 0

    def __init__(self, slot: np.ndarray | None = None, as_torch: bool = False) -> None:
        super().__init__(slot)
        self._as_torch = as_torch

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Returns collate_fn(samples). In this thread alone, default_collate stacks into the buffer meanwhile."""
        if not stacks_as_torch_does():
            return collate_fn(samples)
        thread = get_ident()

        def stack(samples: Samples, *, collate_fn_map: object = None) -> torch.Tensor:
            stacked: torch.Tensor = self.stack(samples) if get_ident() == thread else collate_tensor_fn(samples)
            return stacked

        default_collate_fn_map[torch.Tensor] = stack
        try:
            return collate_fn(samples)
        finally:
            if default_collate_fn_map.get(torch.Tensor) is stack:  # else collate_fn has replaced it
                default_collate_fn_map[torch.Tensor] = collate_tensor_fn

    def stack(self, samples: Samples, *, collate_fn_map: object = None) -> torch.Tensor:
        if not self._as_torch:
            return super().stack(samples)
        first, kinds = samples[0], set(map(type, samples))
        if kinds == {torch.Tensor} and is_plain(first) and first.dtype in SHAREABLE:
            with suppress(NotImplementedError):  # for a nested tensor among them: torch's words come below
                return torch.stack(samples, out=self.empty((len(samples), *first.shape), first.dtype))
        are_tensors = first.dtype in SHAREABLE and all(issubclass(kind, torch.Tensor) for kind in kinds)
        if are_tensors and all(is_plain(sample) and sample.shape == first.shape for sample in samples):
            return torch.stack(samples)
        refused: torch.Tensor = collate_tensor_fn(samples)
        return refused


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is nothing but strided CPU memory, as torchvision's tv_tensors are too."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout != torch.strided:
        return False
    if not tensor.is_cpu or tensor.is_nested or tensor.requires_grad or tensor.is_quantized:
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def stacks_as_torch_does() -> bool:
    """Returns whether default_collate stacks tensors with torch's function, which users may replace in its map."""
    return default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
