"""Batches in shared memory, allocated once and used again.

Invariant: a slot is either free, or being written by exactly one task, or leased to the consumer. A lease ends when
the last tensor on its memory dies, wherever that is: a finaliser only appends to a deque and takes no lock.

The memory is a memfd, mapped a slot at a time: it is not bound by the size of /dev/shm, leaves nothing behind when its
processes are killed, and needs no resource tracker.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections import deque

import numpy as np
import torch

log = logging.getLogger(__name__)

ALIGNMENT = 64


def align(size: int, to: int = ALIGNMENT) -> int:
    return -(-size // to) * to


class Slot:
    """A part of the ring's memory, mapped into this process: `capacity` bytes at `offset` of the memfd."""

    def __init__(self, fd: int, offset: int, capacity: int, flags: int = mmap.MAP_SHARED) -> None:
        self.offset, self.capacity = offset, capacity
        self.memory = mmap.mmap(fd, capacity, flags, offset=offset)

    @classmethod
    def for_writing(cls, fd: int, offset: int, capacity: int) -> Slot:
        """As a worker maps it: it provides the memory, so that the parent need not wait for it to be cleared.

        Raises MemoryError, in a sentence, where the machine has none left.
        """
        try:
            os.posix_fallocate(fd, offset, capacity)
        except OSError as error:
            raise MemoryError(
                f"no memory for a batch of {capacity:,} bytes ({error.strerror}): "
                "lower batch_size, num_workers or prefetch_factor"
            ) from error
        # All pages are mapped at once: several times as fast as one by one, as they are first touched.
        return cls(fd, offset, capacity, mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def array(self) -> np.ndarray:
        """The slot's bytes, uint8 (capacity,), as a new array object that keeps the mapping alive."""
        return np.frombuffer(self.memory, np.uint8)


class SlotRing:
    """At most `count` slots, made when first needed, each as large as the largest batch seen so far."""

    def __init__(self, count: int, page_locked: bool = False) -> None:
        self.fd = os.memfd_create("loader-slots", os.MFD_CLOEXEC)
        self.count = count
        self.capacity = 0
        self._page_locked = page_locked
        self._free: deque[Slot] = deque()
        self._returned: deque[Slot] = deque()  # appended to by finalisers, in any thread
        self._made, self._end = 0, 0

    def fit(self, size: int) -> None:
        """Makes slots that are issued from now on hold at least `size` bytes."""
        if size > self.capacity:
            self.capacity = align(size, mmap.ALLOCATIONGRANULARITY)

    def acquire(self) -> Slot | None:
        """A slot for a task to write, or None while there is none to spare."""
        self._collect()
        while self._free:
            slot = self._free.pop()  # the last one used: its pages are mapped, and fewer slots are in use
            if slot.capacity >= self.capacity:
                return slot
            self._discard(slot)
        if self.capacity == 0 or self._made == self.count:
            return None
        return self._make()

    def has_spare(self) -> bool:
        """Whether `acquire` would give a slot."""
        self._collect()
        return bool(self._free) or self._made < self.count

    def release(self, slot: Slot) -> None:
        """Gives back a slot that no task writes any more and that was not leased."""
        if self.fd < 0:
            self._unlock(slot)
        else:
            self._free.append(slot)

    def lease(self, slot: Slot) -> torch.Tensor:
        """The slot's bytes as a tensor, uint8 (capacity,); the slot comes back when the last view of it dies."""
        array = slot.array()
        weakref.finalize(array, self._give_back, slot).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Lets go of the memory; leased slots stay valid until their tensors die."""
        if self.fd < 0:
            return
        self._collect()
        while self._free:
            self._unlock(self._free.pop())
        self._made = self.count
        os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()

    def _give_back(self, slot: Slot) -> None:
        if self.fd < 0:
            self._unlock(slot)
        else:
            self._returned.append(slot)

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def _make(self) -> Slot:
        os.ftruncate(self.fd, self._end + self.capacity)
        slot = Slot(self.fd, self._end, self.capacity)
        self._made, self._end = self._made + 1, self._end + self.capacity
        if self._page_locked:
            self._lock(slot)
        return slot

    def _discard(self, slot: Slot) -> None:
        """Gives the pages of a slot that has become too small back to the system."""
        self._unlock(slot)
        slot.memory.madvise(mmap.MADV_REMOVE)
        self._made -= 1

    def _lock(self, slot: Slot) -> None:
        """Page-locks the slot, for copies to a GPU that nobody waits for; without that they are only slower."""
        try:
            address = slot.array().ctypes.data
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, slot.capacity, 0))
        except RuntimeError as error:
            self._page_locked = False
            log.warning("batches cannot be page-locked, so copies to the GPU will be slower: %s", error)

    def _unlock(self, slot: Slot) -> None:
        if self._page_locked:
            torch.cuda.cudart().cudaHostUnregister(slot.array().ctypes.data)
