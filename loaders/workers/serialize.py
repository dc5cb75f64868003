"""Pickles a batch without the memory of its tensors, which is sent in a slot: the pickle has a number for each tensor.

Everything else is pickled as torch's loader pickles it, by multiprocessing's ForkingPickler. Tensors that share a
storage still share it afterwards. Of a storage only the areas in which the batch's tensors lie are sent.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterator
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _get_obj_state

from ..preload.accelerator import is_page_locked
from .batch_buffer import ALIGNMENT, SHAREABLE, SMALL, WorkerBuffer, is_plain
from .shared_memory import SharedMemory, align, create_shared_memory, full_machine_explained, page_aligned

GRANULE = 16  # an area begins at a multiple of it: the size of the largest dtype
# A view that uses less than a SPARSE_SHARE of an area larger than SPARSE_BYTES is sent as a contiguous copy: a column
# of a large dataset, for example.
SPARSE_SHARE, SPARSE_BYTES = 1 / 8, 1 << 20
DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}  # shorter in a pickle


class Payload(NamedTuple):
    """A batch as it is sent. An area is (offset, bytes); an offset n >= 0 is in the slot, -1 - n in the overflow."""

    areas: list[tuple[int, int]]
    tensors: list[Any]  # (area, offset in elements, number in DTYPES, shape, stride) each; (area,) for a storage
    pickled: bytes


def dump(batch: Any, buffer: WorkerBuffer) -> tuple[Payload, SharedMemory | None, bool]:
    """Returns the batch as a payload, the memory of what did not fit into the slot, and whether a tensor was odd.

    Odd tensors (sparse, nested, with gradients, ...) are taken apart by torch, which takes longer.
    """
    file = io.BytesIO()
    pickler = _BatchPickler(file)
    pickler.dump(batch)
    packer = _Packer(buffer)
    tensors = packer.pack(pickler.found)
    return Payload(packer.areas, tensors, file.getvalue()), packer.write_overflow(), pickler.is_odd


def load(payload: Payload, slot: np.ndarray | None, overflow: np.ndarray | None) -> Any:
    """Returns the batch. Its tensors lie in `slot` and `overflow`, both uint8 (size,); small ones are copies,
    unless the slot is page-locked."""
    return _BatchUnpickler(payload, slot, overflow).load()


@cache
def initialise_torch() -> None:
    """Calls the functions of torch that make, send and receive batches, before the first worker is forked.

    Each initialises itself at its first call, under a lock of the C library. If another thread called one during a
    fork, the worker would inherit the lock taken, and hang at its own first call.
    """
    buffer = WorkerBuffer(np.empty(1024, np.uint8))
    made = [torch.tensor([1, 2]), torch.tensor([1.0]), torch.as_tensor(np.zeros(2))]
    payload, overflow, _ = dump([*made, buffer.stack(made[1:2] * 2)], buffer)
    load(payload, buffer.slot, None if overflow is None else overflow.array())


class _BatchPickler(ForkingPickler):
    """Replaces plain tensors, and the storages of odd ones, by their numbers in `found`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)  # with the protocol of torch's queues: a newer one keeps arrays read-only
        self.found: list[torch.Tensor | torch.UntypedStorage] = []
        self.is_odd = False
        self._numbers: dict[int, int] = {}  # by id, so that a tensor that occurs twice is sent once

    def persistent_id(self, item: Any) -> int | None:
        kind = type(item)
        if kind is torch.Tensor:
            if item.is_cuda:
                raise TypeError(
                    "a worker made a CUDA tensor: make CPU tensors there, and move the batch in the main process"
                )
            if not is_plain(item):
                self.is_odd = True
                return None  # torch takes it apart, into storages or plain tensors
        elif kind is not torch.UntypedStorage or item.device.type != "cpu":
            return None
        number = self._numbers.setdefault(id(item), len(self.found))
        if number == len(self.found):
            self.found.append(item)  # which keeps it alive, so that no other object gets its id
        return number

    def reducer_override(self, item: Any) -> Any:
        """Sends a tensor of a subclass, such as torchvision's tv_tensors, as Tensor.__reduce_ex__ does.

        That would send the whole storage, which is the dataset if the sample is a row of it.
        """
        kind = type(item)
        if not isinstance(item, torch.Tensor):
            return NotImplemented
        if kind is torch.Tensor and (item.is_quantized or item.is_conj() or item.is_neg()):
            return item.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # ForkingPickler would lose what these bits mean
        if kind in self.dispatch_table or not is_plain(item):
            return NotImplemented
        if any(getattr(kind, name) is not getattr(torch.Tensor, name) for name in ("__reduce_ex__", "__reduce__")):
            return NotImplemented
        plain = item.as_subclass(torch.Tensor)
        return _rebuild_from_type_v2, (_same, kind, (plain,), _get_obj_state(item))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Packer:
    """Chooses the areas of a batch, and copies those that do not lie in the slot yet."""

    def __init__(self, buffer: WorkerBuffer) -> None:
        self.areas: list[tuple[int, int]] = []
        self._buffer = buffer
        self._address = buffer.slot.ctypes.data
        self._overflow: list[tuple[int, int, int, object]] = []  # offset, address, bytes, and what owns the address
        self._overflow_end = 0

    def pack(self, found: list[Any]) -> list[Any]:
        """Returns a reference to each tensor and storage, as Payload has them."""
        references: list[Any] = [None] * len(found)
        by_storage: dict[int, list[int]] = {}
        for number, item in enumerate(found):
            by_storage.setdefault(_storage(item)._cdata, []).append(number)
        for numbers in by_storage.values():
            storage = _storage(found[numbers[0]])
            distance = storage.data_ptr() - self._address
            is_placed = 0 <= distance < len(self._buffer.slot)
            for start, stop, members in [(0, storage.nbytes(), numbers)] if is_placed else _clusters(found, numbers):
                # A member may be a copy of what the storage has.
                offset = distance if is_placed else self._place(_storage(found[members[0]]), start, stop - start)
                for number in members:
                    references[number] = _reference(found[number], len(self.areas), start)
                self.areas.append((offset, stop - start))
        return references

    def write_overflow(self) -> SharedMemory | None:
        """Returns shared memory with the areas that did not fit into the slot; None if all did."""
        if not self._overflow:
            return None
        size = page_aligned(self._overflow_end)
        with full_machine_explained(f"providing {size:,} bytes for a batch"):
            memory = SharedMemory(create_shared_memory(size))
            address = memory.array(provide=True).ctypes.data
        for offset, source, count, _ in self._overflow:
            ctypes.memmove(address + offset, source, count)
        return memory

    def _place(self, storage: torch.UntypedStorage, start: int, size: int) -> int:
        """Copies an area into the slot, or notes it for the overflow; returns its offset, see Payload."""
        if not size:
            return 0
        source = storage.data_ptr() + start
        self._buffer.outside -= self._buffer.missed.pop(source, 0)  # it was counted when it was made
        offset = self._buffer.place(size)
        if offset is not None:
            ctypes.memmove(self._address + offset, source, size)
            return offset
        offset, self._overflow_end = self._overflow_end, self._overflow_end + align(size, ALIGNMENT)
        self._overflow.append((offset, source, size, storage))
        return -1 - offset


def _storage(item: Any) -> torch.UntypedStorage:
    return item if isinstance(item, torch.UntypedStorage) else item.untyped_storage()


def _reference(item: Any, area: int, start: int) -> Any:
    """Returns how Payload refers to a tensor or storage, in an area that begins at byte `start` of its storage."""
    if isinstance(item, torch.UntypedStorage):
        return (area,)
    offset = item.storage_offset() - start // item.itemsize
    return area, offset, DTYPE_NUMBERS[item.dtype], tuple(item.size()), item.stride()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns where the tensor begins and ends in its storage, in bytes."""
    first, size = int(tensor.storage_offset()), tensor.itemsize
    if not tensor.numel():
        return 0, 0  # its offset may be beyond the storage
    last = first + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return first * size, (last + 1) * size


def _clusters(found: list[Any], numbers: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Yields the areas (start, stop) of a storage that are sent, each with the numbers of the views in it.

    Views are in one area if they overlap, or if the gap between them is not larger than what comes before it. So no
    more than twice the memory that the batch uses is sent, though a storage may be a whole dataset. A sparse view
    outside of all areas, such as a column of a dataset, is replaced by a contiguous copy.
    """
    views: list[tuple[int, int, int]] = []
    sparse: list[tuple[int, int, int]] = []
    for number in numbers:
        item = found[number]
        if isinstance(item, torch.UntypedStorage):
            views.append((0, item.nbytes(), number))
            continue
        begin, end = _extent(item)
        is_sparse = end - begin > SPARSE_BYTES and item.nbytes < SPARSE_SHARE * (end - begin)
        (sparse if is_sparse else views).append((begin, end, number))
    views.sort()
    areas: list[tuple[int, int, list[int]]] = []
    for begin, end, number in views:
        start, stop, members = areas[-1] if areas else (0, 0, [])
        if not areas or begin - stop > stop - start:
            areas.append((begin, end, [number]))
        else:
            members.append(number)
            areas[-1] = start, max(stop, end), members
    for begin, end, number in sparse:
        around = next((members for start, stop, members in areas if start <= begin and end <= stop), None)
        if around is not None:
            around.append(number)
        else:
            found[number] = found[number].contiguous()
            yield 0, found[number].nbytes, [number]
    for start, stop, members in areas:
        yield start // GRANULE * GRANULE, stop, members


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, payload: Payload, slot: np.ndarray | None, overflow: np.ndarray | None) -> None:
        super().__init__(io.BytesIO(payload.pickled))
        self._payload, self._slot, self._overflow = payload, slot, overflow
        # Page-locked slots are for a Preloader, which drops the host batch once it is copied.
        is_kept = slot is None or not is_page_locked(slot)
        self._least = SMALL * sum(size for _, size in payload.areas) if is_kept else 0
        self._storages: list[torch.UntypedStorage | None] = [None] * len(payload.areas)
        self._tensors: dict[int, Any] = {}

    def persistent_load(self, number: int) -> Any:
        if number not in self._tensors:
            reference = self._payload.tensors[number]
            self._tensors[number] = self._tensor(*reference) if len(reference) > 1 else self._storage(*reference)
        return self._tensors[number]

    def _tensor(
        self, area: int, offset: int, kind: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        storage, dtype = self._storages[area], DTYPES[kind]
        if storage is None and dtype in SHAREABLE and self._payload.areas[area][1] % dtype.itemsize == 0:
            tensor = self._memory(area, dtype)
            self._storages[area] = storage = tensor.untyped_storage()
        else:
            storage, tensor = self._storage(area), torch.empty(0, dtype=dtype, device="cpu")
        return tensor.set_(storage, offset, shape, stride)

    def _storage(self, area: int) -> torch.UntypedStorage:
        storage = self._storages[area]
        if storage is None:
            self._storages[area] = storage = self._memory(area, torch.uint8).untyped_storage()
        return storage

    def _memory(self, area: int, dtype: torch.dtype) -> torch.Tensor:
        offset, size = self._payload.areas[area]
        if not size:
            return torch.empty(0, dtype=dtype, device="cpu")
        memory, offset = (self._slot, offset) if offset >= 0 else (self._overflow, -1 - offset)
        flat = torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=offset)
        return flat.clone() if size < self._least else flat
