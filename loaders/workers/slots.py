"""A ring of slots: each is memory for one batch, allocated once and reused.

Invariant: a slot is either free or leased, first to the task that writes it, then to the batch that lies in it. A
lease ends when the last tensor on its memory dies. That may happen in any thread, so the finaliser takes no lock: it
only appends to a deque.

Slots of worker processes lie in shared memory; those of threads in the process's private memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from .shared_memory import Mapping, create_shared_memory, full_machine_explained, page_aligned

log = logging.getLogger(__name__)

GROWTH = 1.25  # slots grow by at least this factor, so that growing batches seldom need new slots
OUTLIER = 2  # slots do not grow for a single batch that is more than this many times as large as a slot
LATEST = 16  # how many of the latest batches decide the size of slots


@dataclass(eq=False)
class Slot:
    """Memory for one batch. `place` tells worker processes where it is: (number, offset, capacity), in bytes."""

    memory: Mapping | np.ndarray
    capacity: int
    place: tuple[int, int, int] | None = None
    is_page_locked: bool = False

    def array(self) -> np.ndarray:
        """Returns the bytes, uint8 (capacity,), as a new array object that keeps the memory alive."""
        return self.memory.array() if isinstance(self.memory, Mapping) else np.frombuffer(self.memory, np.uint8)


@dataclass
class Lease:
    """A slot's bytes, uint8 (capacity,). When the array and all tensors on it have died, the slot is free again."""

    array: np.ndarray
    place: tuple[int, int, int] | None


class Control:
    """Shared memory that tells the parent which row each worker is reading, and the workers when to stop.

    `rows` is int64 (num_workers + 1,): each worker's row (see Death.row), and then 1 if the workers have to stop.
    """

    def __init__(self, fd: int, num_workers: int) -> None:
        self.rows = Mapping(fd, 0, control_bytes(num_workers)).array().view(np.int64)
        self._num_workers = num_workers

    @property
    def is_stopping(self) -> bool:
        return bool(self.rows[self._num_workers])

    def stop(self) -> None:
        self.rows[self._num_workers] = 1


def control_bytes(num_workers: int) -> int:
    return page_aligned(8 * (num_workers + 1))


class SlotRing:
    """At most `count` slots, each made when it is first needed, and large enough for the latest batches.

    They are shared with `num_workers` processes; if that is 0, `fd` is None. Copies from `page_locked` slots to a GPU
    do not block the host; whoever copies must hold the lease until the copy is done.
    """

    def __init__(self, count: int, num_workers: int, page_locked: bool = False) -> None:
        self.fd: int | None = None
        self._end = 0
        if num_workers:
            with full_machine_explained("making shared memory for batches"):
                self._end = control_bytes(num_workers)
                self.fd = create_shared_memory(self._end)
        self.capacity = 0
        self._latest: deque[int] = deque(maxlen=LATEST)  # sizes of batches
        self._count = count
        self._page_locked = page_locked
        self._free: deque[Slot] = deque()
        self._returned: deque[Slot] = deque()  # appended to by finalisers, in any thread
        self._made = 0
        self._numbers = list(range(count))  # unused slot numbers
        self._owner = os.getpid()
        self._closed = False

    def fit(self, size: int) -> None:
        """Notes the size of a batch, in bytes; slots that are leased from now on are made to fit the latest sizes."""
        self._latest.append(size)
        if not size:
            return
        if size > self.capacity:
            outliers = sorted(latest for latest in self._latest if latest > OUTLIER * self.capacity)
            if self.capacity and size > OUTLIER * self.capacity:
                size = outliers[-2] if len(outliers) > 1 else 0
            if size > self.capacity:
                self.capacity = page_aligned(max(size, int(GROWTH * self.capacity)))
        elif len(self._latest) == LATEST and OUTLIER * (largest := max(self._latest)) * GROWTH < self.capacity:
            self.capacity = page_aligned(int(GROWTH * largest))

    def acquire(self) -> Lease | None:
        """Leases a slot for a task to write into, or returns None if all are leased or no size is known yet."""
        self._collect()
        slot = None
        while slot is None and self._free:
            slot = self._free.pop()  # the one used last: its pages are mapped, and fewer slots are in use
            if not self.capacity <= slot.capacity <= self.capacity * OUTLIER * GROWTH:
                self._discard(slot)
                slot = None
        if slot is None:
            if self.capacity == 0 or self._made == self._count or self._closed:
                return None
            slot = self._make()
        array = slot.array()
        weakref.finalize(array, self._give_back, slot).atexit = False
        return Lease(array, slot.place)

    def has_free(self) -> bool:
        """Returns whether `acquire` would lease a slot without making one."""
        self._collect()
        return bool(self._free)

    def has_spare(self) -> bool:
        """Returns whether `acquire` could lease a slot."""
        return self.has_free() or self._made < self._count

    def close(self) -> None:
        """Frees the memory of all slots that are not leased; leased ones stay valid until their tensors die."""
        if self._closed:
            return
        self._closed = True
        self._collect()
        while self._free:
            self._discard(self._free.pop())
        if self.fd is not None:
            os.close(self.fd)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()

    def _give_back(self, slot: Slot) -> None:
        """Ends a lease; called by a finaliser, in any thread."""
        self._returned.append(slot)
        if self._closed:
            with suppress(IndexError):
                self._discard(self._returned.popleft())

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def _make(self) -> Slot:
        with full_machine_explained(f"making room for a batch of {self.capacity:,} bytes"):
            if self.fd is None and self._page_locked:
                # Not np.empty: page-locked slots must not share pages, and a fork must not move their memory.
                slot = Slot(np.frombuffer(mmap.mmap(-1, self.capacity), np.uint8), self.capacity)
            elif self.fd is None:
                slot = Slot(np.empty(self.capacity, np.uint8), self.capacity)
            else:
                os.ftruncate(self.fd, self._end + self.capacity)
                mapping = Mapping(self.fd, self._end, self.capacity)
                slot = Slot(mapping, self.capacity, (self._numbers.pop(), self._end, self.capacity))
                self._end += self.capacity
        self._made += 1
        if self._page_locked:
            self._lock(slot)
        return slot

    def _discard(self, slot: Slot) -> None:
        """Returns a slot's memory to the system at once, even if workers still have it mapped."""
        self._made -= 1
        if slot.place is not None:
            self._numbers.append(slot.place[0])
        if os.getpid() != self._owner:  # in a forked child, whose parent still uses the memory
            return
        if slot.is_page_locked:
            torch.cuda.cudart().cudaHostUnregister(slot.array().ctypes.data)
        if isinstance(slot.memory, Mapping):
            slot.memory.free_pages()

    def _lock(self, slot: Slot) -> None:
        """Page-locks the slot. If that fails, copies to a GPU are slower; the log says so once."""
        try:
            address = slot.array().ctypes.data
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, slot.capacity, 0))
            slot.is_page_locked = True
        except RuntimeError as error:
            self._page_locked = False
            log.warning("batches cannot be page-locked, so copies to the GPU will be slower: %s", error)
            with suppress(RuntimeError):  # CUDA reports the failure again at its next call: make a call that may fail
                torch.zeros(1, device="cuda")
