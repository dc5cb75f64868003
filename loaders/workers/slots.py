"""A ring of slots: each is memory for one batch, allocated once and reused.

Invariant: a slot is either free, or being written by exactly one task, or leased to the batch that lies in it; and it
is written again only when nobody is left who could read it:
- the consumer's last tensor on it has died: the slot has a weak reference to the array that they lie on, and is free
  when that is dead. Nothing runs at the array's death, so no signal handler and no other thread can interfere;
- the worker that wrote it holds no tensor on it, and no process was forked while the batch was delivered and alive.
  Otherwise the slot is retired: its memory is unmapped and closed, and the kernel frees it with the last process that
  uses it.

Slots of worker processes lie in shared memory; those of threads in the process's private memory.
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
from .shared_memory import Forks, SharedMemory, create_shared_memory, full_machine_explained, page_aligned

log = logging.getLogger(__name__)

GROWTH = 1.25  # slots grow by at least this factor, so that growing batches seldom need new slots
OUTLIER = 2  # slots do not grow for a single batch that is more than this many times as large as a slot
LATEST = 16  # how many of the latest batches decide the size of slots


@dataclass(eq=False)
class Slot:
    """Memory for one batch. Its number tells worker processes which slot it is, and is never used again."""

    number: int
    memory: SharedMemory | np.ndarray
    capacity: int  # bytes
    has_readers: bool = False  # somebody beside the consumer may read it: it is retired after its lease
    is_retired: bool = False
    _forks: int | None = None  # Forks.count when its batch was delivered
    _leased: Callable[[], np.ndarray | None] = lambda: None  # a weak reference to the lease's array

    @property
    def is_leased(self) -> bool:
        return self._leased() is not None

    def lease(self) -> Lease:
        array = self.array()
        self._leased = weakref.ref(array)
        return Lease(array, self)

    def deliver(self) -> None:
        """Is called before the consumer gets the batch in the slot."""
        if isinstance(self.memory, SharedMemory):  # a forked child has its own copy of private memory
            self.memory.is_delivered = True
            self._forks = Forks.count

    def end_lease(self) -> None:
        """Is called some time after the last tensor on the slot has died."""
        if self._forks is not None:
            self.has_readers |= Forks.count != self._forks or Forks.count % 2 == 1
            self._forks = None
            if not self.has_readers:
                self.memory.is_delivered = False  # type: ignore[union-attr]  # see `deliver`

    def array(self) -> np.ndarray:
        """Returns the bytes, uint8 (capacity,), as a new array object that keeps the memory alive."""
        return self.memory.array() if isinstance(self.memory, SharedMemory) else np.frombuffer(self.memory, np.uint8)


@dataclass
class Lease:
    """A slot's bytes, uint8 (capacity,). When the array and all tensors on it have died, the slot is free again."""

    array: np.ndarray
    slot: Slot


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
                slot.end_lease()
                if not slot.has_readers:
                    return slot
                self._discard(slot)
        return None

    @classmethod
    def end_leases(cls) -> None:
        """Runs before a fork, so that it retires no slot whose tensors have died."""
        for slot in [slot for ring in list(cls._rings) for slot in ring._slots]:
            if not slot.is_leased:
                slot.end_lease()

    def _make(self) -> Slot:
        with full_machine_explained(f"making room for a batch of {self.capacity:,} bytes"):
            memory: SharedMemory | np.ndarray
            if self._shared or self._page_locked:  # a fork does not move shared memory, so it can be page-locked
                memory = SharedMemory(create_shared_memory(self.capacity))
                memory.array()  # maps it here, where an error says what failed
                if self._page_locked:
                    self._lock(memory)
            else:
                memory = np.empty(self.capacity, np.uint8)
        slot = Slot(next(self._numbers), memory, self.capacity)
        self._slots.append(slot)
        return slot

    def _discard(self, slot: Slot) -> None:
        """Retires a slot: drops this process's mapping and descriptor of its memory."""
        slot.is_retired = True
        if isinstance(slot.memory, SharedMemory):
            slot.memory.close()
        with suppress(ValueError):  # an interrupted call has removed it
            self._slots.remove(slot)

    def _lock(self, memory: SharedMemory) -> None:
        """Page-locks a slot's memory. If that fails, copies to a GPU are slower; the log says so once."""
        address = memory.array().ctypes.data
        if _succeeds(accelerator.page_lock, address, memory.size):
            memory.before_unmapping(_unlock, address, os.getpid())
        else:
            self._page_locked = False


def _unlock(address: int, owner: int) -> None:
    if os.getpid() == owner:  # page-locked memory belongs to a process
        _succeeds(accelerator.page_unlock, address)


def _succeeds(function: Callable[..., None], *arguments: int) -> bool:
    """Calls the function, and returns whether it raised nothing; the log says once if it did."""
    try:
        function(*arguments)
        return True
    except RuntimeError as error:
        _warn_once(function.__name__, str(error))
        with suppress(RuntimeError):
            accelerator.clear_error()
        return False


@cache
def _warn_once(function: str, reason: str) -> None:
    log.warning("%s failed for a batch, so copies to the GPU may be slower: %s", function, reason)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=SlotRing.end_leases)  # it runs before Forks.step, which was registered earlier
