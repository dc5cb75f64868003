"""A ring of slots: each is memory for one batch, allocated once and reused.

Invariant: a slot is either free, or being written by exactly one task, or leased to the batch that lies in it; and it
is written again only when nobody is left who could read it:
- the consumer's last tensor on it has died: the slot has a weak reference to the array that they lie on, and is free
  when that is dead. Nothing runs at the array's death, so no signal handler and no other thread can interfere;
- the worker that wrote it holds no tensor on it, and no process was forked while the batch was delivered and alive.
  Otherwise the slot is retired: its memory is unmapped and closed, and the kernel frees it with the last process that
  uses it.

A slot that has to be page-locked is locked when it is made, before its first lease, and never grows: for larger
batches another slot is made. It is unlocked when the last array on it dies, and only then unmapped. So a copy to a
device, whose batch is held until it is done, reads locked memory from beginning to end. If locking fails, slots serve
all the same, and a warning gives the reason once.

Slots of worker processes, and page-locked ones, lie in shared memory, which a fork does not move; those of threads in
the process's private memory.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from ..preload import accelerator
from .shared_memory import SharedMemory, array_on, create_shared_memory, full_machine_explained, page_aligned

log = logging.getLogger(__name__)

GROWTH = 1.25  # slots grow by at least this factor, so that growing batches seldom need new slots
OUTLIER = 2  # slots do not grow for a single batch that is more than this many times as large as a slot
LATEST = 16  # how many of the latest batches decide the size of slots


@dataclass
class Lease:
    """A slot's bytes, uint8 (capacity,). When the array and all tensors on it have died, the slot is free again."""

    array: np.ndarray
    slot: Slot


class Slot:
    """Memory for one batch. Its number tells worker processes which slot it is, and is never used again."""

    has_readers = False  # somebody beside the consumer may read it: it is retired after its lease
    is_retired = False

    def __init__(self, number: int, capacity: int, shared: bool) -> None:
        self.number, self.capacity = number, capacity  # bytes
        self.memory = SharedMemory(create_shared_memory(capacity)) if shared else None
        self._bytes = np.empty(capacity, np.uint8) if self.memory is None else self.memory.array()
        self._leased: Callable[[], np.ndarray | None] = lambda: None

    @property
    def is_leased(self) -> bool:
        return self._leased() is not None

    def lease(self) -> Lease:
        if self.memory is not None:
            self.memory.is_delivered = False
        array = array_on(self._bytes)
        self._leased = weakref.ref(array)
        return Lease(array, self)

    def deliver(self) -> None:
        """Is called before the consumer gets the batch in the slot."""
        if self.memory is not None:  # a forked child has its own copy of private memory
            self.memory.is_delivered = True

    def note_fork(self) -> None:
        """Is called before a fork, and after it: another thread may have delivered a batch meanwhile."""
        if self.memory is not None and self.memory.is_delivered:
            self.memory.is_delivered = self.is_leased
            self.has_readers |= self.is_leased

    def retire(self) -> None:
        """Drops this process's mapping and descriptor of the memory; what is leased stays mapped until it dies."""
        self.is_retired = True
        if self.memory is not None:
            self.memory.close()
        self._bytes = np.empty(0, np.uint8)

    def page_lock(self) -> None:
        """Page-locks the memory until the last array on it dies. Raises RuntimeError if that fails."""
        assert self.memory is not None  # private memory is not page-locked
        address = self._bytes.ctypes.data
        accelerator.page_lock(address, self.capacity)
        self.memory.before_unmapping(_unlock, address, os.getpid())


class SlotRing:
    """At most `count` slots, each made when it is first needed, and large enough for the latest batches.

    Retired slots do not count. `shared`: worker processes write into them. Copies from `page_locked` slots to a GPU do
    not block the host; whoever copies must hold the lease until the copy is done.
    """

    _rings: ClassVar[weakref.WeakSet[SlotRing]] = weakref.WeakSet()

    def __init__(self, count: int, shared: bool, page_locked: bool = False) -> None:
        self.capacity = 0
        self._latest: deque[int] = deque(maxlen=LATEST)  # sizes of batches
        self._count = count
        self._shared = shared
        self._page_locked = page_locked
        self._slots: list[Slot] = []
        self._numbers = itertools.count()
        self._closed = False
        self._rings.add(self)

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
        slot = self._free()
        while slot is not None and not self.capacity <= slot.capacity <= self.capacity * OUTLIER * GROWTH:
            self._discard(slot)
            slot = self._free()
        if slot is None:
            if self.capacity == 0 or len(self._slots) == self._count or self._closed:
                return None
            slot = self._make()
        return slot.lease()

    def has_free(self) -> bool:
        """Returns whether `acquire` would lease a slot without making one."""
        return self._free() is not None

    def has_spare(self) -> bool:
        """Returns whether `acquire` could lease a slot."""
        return self.has_free() or len(self._slots) < self._count

    def close(self) -> None:
        """Frees the memory of all slots that are not leased; that of leased ones is freed when their tensors die."""
        self._closed = True
        for slot in list(self._slots):
            self._discard(slot)

    def _free(self) -> Slot | None:
        """Returns a slot that may be written, the first one: so few of them are in use."""
        for slot in list(self._slots):
            if not slot.is_leased:
                if not slot.has_readers:
                    return slot
                self._discard(slot)
        return None

    def _make(self) -> Slot:
        with full_machine_explained(f"making room for a batch of {self.capacity:,} bytes"):
            slot = Slot(next(self._numbers), self.capacity, self._shared or self._page_locked)
        if self._page_locked:
            try:
                slot.page_lock()
            except RuntimeError as error:
                self._page_locked = False
                warn_of_pageable_slots(str(error))
                with suppress(RuntimeError):
                    accelerator.clear_error()
        self._slots.append(slot)
        return slot

    def _discard(self, slot: Slot) -> None:
        slot.retire()
        with suppress(ValueError):  # an interrupted call has removed it
            self._slots.remove(slot)

    @classmethod
    def note_fork(cls) -> None:
        for slot in [slot for ring in list(cls._rings) for slot in list(ring._slots)]:
            slot.note_fork()


@cache
def warn_of_pageable_slots(reason: str) -> None:
    log.warning("page-locking a batch failed, so copies to the GPU may be slower: %s", reason)


def _unlock(address: int, owner: int) -> None:
    if os.getpid() != owner:  # page-locked memory belongs to a process
        return
    try:
        accelerator.page_unlock(address)
    except RuntimeError:
        with suppress(RuntimeError):
            accelerator.clear_error()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=SlotRing.note_fork, after_in_parent=SlotRing.note_fork)
