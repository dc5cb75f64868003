"""Moves a batch's tensors to a device without blocking the host, those that lie side by side in one copy.

Tensors are copied together if they lie in the same slot, or share a storage, and each is at least a quarter of what is
copied. So whoever keeps one of them on the device keeps at most four times its memory: labels do not keep images.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..nested import is_dense, leaves, move, tensors
from ..workers.batch_buffer import SMALL, is_plain
from .accelerator import page_locked_at

ROUNDED = 512  # bytes: a device's allocator gives no less, so smaller tensors count as that

# The strided tensors inside a sparse one.
PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@dataclass
class _Group:
    """Tensors on the host that are copied together: the bytes from `start` to `end`."""

    place: object  # the start of the page-locked memory, or the storage
    is_page_locked: bool
    start: int
    end: int
    smallest: int  # bytes of the smallest tensor
    tensors: list[torch.Tensor] = field(default_factory=list)

    def joins(self, other: _Group) -> bool:
        """Returns whether `other`, which begins later, may be copied together with this one."""
        whole, smallest = max(self.end, other.end) - self.start, min(self.smallest, other.smallest)
        is_aligned = (other.start - self.start) % other.tensors[0].itemsize == 0
        return self.place == other.place and is_aligned and smallest >= SMALL * whole

    def add(self, other: _Group) -> None:
        self.end, self.smallest = max(self.end, other.end), min(self.smallest, other.smallest)
        self.tensors += other.tensors

    def copied(self, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Copies the group, and yields each tensor with its copy. The host's memory must stay until that is done."""
        first, size = self.tensors[0], self.end - self.start
        is_alone = len(self.tensors) == 1
        if not is_alone:
            source = torch.frombuffer((ctypes.c_uint8 * size).from_address(self.start), dtype=torch.uint8)
        else:
            source = first
        if not (self.is_page_locked or first.is_pinned()):  # it asks the driver: about 1 us
            source = source.pin_memory()  # from pageable memory the copy would be synchronous
        copy = source.to(device, non_blocking=True)
        if is_alone:
            yield first, copy
            return
        flat: dict[torch.dtype, torch.Tensor] = {}
        for tensor in self.tensors:
            dtype, width = tensor.dtype, tensor.itemsize
            if dtype not in flat:
                flat[dtype] = copy[: size // width * width].view(dtype)
            offset = (tensor.data_ptr() - self.start) // width
            # .data: else autograd would take an in-place change of one tensor for a change of all of them.
            yield tensor, flat[dtype].as_strided(tensor.size(), tensor.stride(), offset).data


def transfer(batch: Any, device: torch.device, to: Callable[[Any], Any]) -> Any:
    """Returns the batch with its plain host tensors copied to the device, and `to` applied to everything else."""
    groups: list[_Group] = []
    for group in sorted(filter(None, map(_alone, leaves(batch))), key=lambda group: group.start):
        if groups and groups[-1].joins(group):
            groups[-1].add(group)
        else:
            groups.append(group)
    copies = {id(tensor): copy for group in groups for tensor, copy in group.copied(device)}
    return move(batch, lambda leaf: copies[id(leaf)] if id(leaf) in copies else to(leaf))


def _alone(leaf: Any) -> _Group | None:
    """Returns a tensor's own group; None if it has to be moved in another way: a subclass or sparse, for example."""
    if type(leaf) is not torch.Tensor or not is_plain(leaf) or not leaf.numel():
        return None
    if not (leaf.is_contiguous() or is_dense(leaf)):
        return None
    start, size = leaf.data_ptr(), leaf.nbytes
    slot = page_locked_at(start)
    place = slot if slot is not None else leaf.untyped_storage()._cdata
    return _Group(place, slot is not None, start, start + size, max(size, ROUNDED), [leaf])


def strided_parts(batch: Any) -> Iterator[torch.Tensor]:
    """Yields every strided tensor of a batch, also those inside sparse tensors, subclasses, and objects with `.to`."""
    for tensor in tensors(batch):
        yield from _strided(tensor)


def _strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensor, or the strided tensors inside a sparse one or a subclass."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _strided(getattr(tensor, name))
    elif tensor.layout in PARTS:
        yield from (getattr(tensor, name)() for name in PARTS[tensor.layout])
    else:
        yield tensor
