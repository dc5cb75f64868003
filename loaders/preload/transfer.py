"""Moves a batch's tensors to a device without blocking the host, those that lie side by side in one copy.

Tensors are copied together if they lie in the same slot, or share a storage, and each is at least a quarter of what is
copied. So whoever keeps one of them on the device keeps at most four times its memory: labels do not keep images.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from ..nested import is_dense, leaves, move, tensors
from ..workers.batch_buffer import SMALL, is_plain
from .accelerator import page_locked_until

ROUNDED = 512  # bytes: a device's allocator gives no less, so smaller tensors count as that

# The strided tensors inside a sparse one.
ROWS, COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
PARTS: dict[torch.layout, tuple[str, ...]] = {torch.sparse_coo: ("_indices", "_values")}
PARTS |= {torch.sparse_csr: ROWS, torch.sparse_bsr: ROWS, torch.sparse_csc: COLUMNS, torch.sparse_bsc: COLUMNS}


class _Group:
    """Tensors on the host, each with its offset, that are copied together: the bytes from `start` to `end`."""

    def __init__(self, first: torch.Tensor) -> None:
        self._start = self._end = first.data_ptr()
        self._smallest = sys.maxsize
        self._members: list[tuple[torch.Tensor, int]] = []
        locked_until, storage = page_locked_until(self._start), first.untyped_storage()
        self._is_pinned = locked_until is not None or first.is_pinned()  # which asks the driver: about 1 us
        self.limit = locked_until or storage.data_ptr() + storage.nbytes()
        self.takes(first)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Adds a tensor, which does not begin earlier than the others, if it may be copied together with them."""
        size, offset = tensor.nbytes, tensor.data_ptr() - self._start
        end, smallest = max(self._start + offset + size, self._end), min(max(size, ROUNDED), self._smallest)
        if end > self.limit or smallest < SMALL * (end - self._start) or offset % tensor.itemsize:
            return False
        if offset < self._end - self._start:  # they overlap: as after `.to`, none may change when another is written
            return False
        self._end, self._smallest = end, smallest
        self._members.append((tensor, offset))
        return True

    def copies(self, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields each tensor's id and its copy. The host's memory must stay until the copy is done."""
        size, first = self._end - self._start, self._members[0][0]
        source = first
        if len(self._members) > 1:
            source = torch.frombuffer((ctypes.c_uint8 * size).from_address(self._start), dtype=torch.uint8)
        copy = source if self._is_pinned else source.pin_memory()  # from pageable memory it would be synchronous
        copy = copy.to(device, non_blocking=True)
        if source is first:
            yield id(first), copy
            return
        flats: dict[torch.dtype, torch.Tensor] = {}
        for tensor, offset in self._members:
            dtype, width = tensor.dtype, tensor.itemsize
            if dtype not in flats:
                flats[dtype] = copy[: size // width * width].view(dtype)
            view = flats[dtype].as_strided(tensor.size(), tensor.stride(), offset // width)
            # .data: else autograd would take an in-place change of one tensor for a change of all of them.
            yield id(tensor), view.data


def transfer(batch: Any, device: torch.device, to: Callable[[Any], Any]) -> Any:
    """Returns the batch with its plain host tensors copied to the device, and `to` applied to everything else."""
    groups: list[_Group] = []
    unfinished: list[_Group] = []  # those that the next tensors may belong to
    distinct = {id(leaf): leaf for leaf in leaves(batch) if _is_plain(leaf)}
    for tensor in sorted(distinct.values(), key=torch.Tensor.data_ptr):
        unfinished = [group for group in unfinished if tensor.data_ptr() < group.limit]
        if not any(group.takes(tensor) for group in reversed(unfinished)):
            groups.append(_Group(tensor))
            unfinished.append(groups[-1])
    copies = {number: copy for group in groups for number, copy in group.copies(device)}
    return move(batch, lambda leaf: copies[id(leaf)] if id(leaf) in copies else to(leaf))


def _is_plain(leaf: Any) -> bool:
    """Returns whether a leaf is nothing but memory on the host: no subclass and not sparse, for example."""
    if type(leaf) is not torch.Tensor or not is_plain(leaf) or not leaf.numel():
        return False
    return leaf.is_contiguous() or is_dense(leaf)


def strided_parts(batch: Any) -> Iterator[torch.Tensor]:
    """Yields every strided tensor of a batch, also those inside sparse tensors, subclasses, and objects."""
    for tensor in tensors(batch):
        if hasattr(tensor, "__tensor_flatten__"):
            yield from strided_parts([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        elif tensor.layout in PARTS:
            yield from (getattr(tensor, name)() for name in PARTS[tensor.layout])
        else:
            yield tensor


def pinned(batch: Any) -> Any:
    """Returns the batch in torch's own pinned memory, which torch does not reuse while a copy from it is under way."""
    return pin_memory(unlocked(batch))


def unlocked(batch: Any) -> Any:
    """Returns the batch, or a copy of it if host tensors in it lie in a page-locked slot.

    torch takes that for pinned memory of its own, and so does whoever copies from it, but nothing would hold the slot.
    """
    if not any(page_locked_until(part.data_ptr()) is not None for part in strided_parts(batch) if part.is_cpu):
        return batch
    return deepcopy(batch, {id(tensor): tensor for tensor in tensors(batch) if not tensor.is_cpu})
