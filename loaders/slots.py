"""Batches in memory that is allocated once and used again.

Invariant: a slot is either free, or leased: to a task that writes it, then to the batch that lies in it. A lease ends
when the last tensor on its memory dies, wherever that is: a finaliser only appends to a deque and takes no lock.

Shared slots lie in a memfd, mapped one at a time: it is not bound by the size of /dev/shm, leaves nothing behind when
its processes are killed, and needs no resource tracker. Those of threads are the process's own memory.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch

log = logging.getLogger(__name__)

ALIGNMENT = 64
ADVICE = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n), or lower num_workers",
    errno.ENFILE: "too many open files on this machine: lower num_workers",
    errno.EAGAIN: "no more processes are allowed here: raise the limit (ulimit -u), or lower num_workers",
    errno.ENOMEM: "out of memory: lower batch_size, num_workers or prefetch_factor",
    errno.ENOSPC: "out of memory: lower batch_size, num_workers or prefetch_factor",
}


class MachineFull(RuntimeError):
    """There is no memory, descriptor or process left for a loader; says what would help."""


def align(size: int, to: int = ALIGNMENT) -> int:
    return -(-size // to) * to


@contextmanager
def full_machine_explained(doing: str) -> Iterator[None]:
    """Turns the system's refusal of memory, descriptors or processes into MachineFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        raise MachineFull(f"{doing} failed: {ADVICE[error.errno]}") from error


@dataclass
class Slot:
    """A part of the ring's memory, mapped into this process; `offset` is its place in the memfd."""

    memory: mmap.mmap | np.ndarray
    offset: int = 0
    is_locked: bool = False  # into physical memory, for a GPU

    @classmethod
    def for_writing(cls, fd: int, offset: int, capacity: int) -> Slot:
        """As a worker maps it: it provides the memory, so that the parent need not wait for it to be cleared.

        Raises MachineFull where there is none left.
        """
        with full_machine_explained(f"providing {capacity:,} bytes for a batch"):
            os.posix_fallocate(fd, offset, capacity)
            # All pages are mapped at once: several times as fast as one by one, as they are first touched.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return cls(mmap.mmap(fd, capacity, flags, offset=offset), offset)

    @property
    def capacity(self) -> int:
        return len(self.memory)

    def array(self) -> np.ndarray:
        """The slot's bytes, uint8 (capacity,), as a new array object that keeps the mapping alive."""
        return np.frombuffer(self.memory, np.uint8)


@dataclass
class Lease:
    """A slot's bytes, uint8 (capacity,), and their place in the memfd; forgotten, the slot is free again."""

    memory: torch.Tensor
    offset: int


def map_marks(fd: int, num_workers: int) -> memoryview:
    """The first bytes of a ring's memfd: an int64 a worker, the row of its batch that it reads, or -1."""
    return memoryview(mmap.mmap(fd, 8 * num_workers)).cast("q")


class SlotRing:
    """At most `count` slots, made when first needed, each as large as the largest batch seen so far.

    They are shared with `num_workers` processes, or with none: then `fd` is None.
    """

    def __init__(self, count: int, num_workers: int, page_locked: bool = False) -> None:
        self.fd: int | None = None
        self._end = 0
        if num_workers:
            with full_machine_explained("making shared memory for batches"):
                self.fd = os.memfd_create("loader-slots", os.MFD_CLOEXEC)
                self._end = align(8 * num_workers, mmap.ALLOCATIONGRANULARITY)
                os.ftruncate(self.fd, self._end)
        self.capacity = 0
        self._count = count
        self._page_locked = page_locked
        self._free: deque[Slot] = deque()
        self._returned: deque[Slot] = deque()  # appended to by finalisers, in any thread
        self._made = 0
        self._closed = False

    def fit(self, size: int) -> None:
        """Makes slots that are issued from now on hold at least `size` bytes."""
        if size > self.capacity:
            self.capacity = align(size, mmap.ALLOCATIONGRANULARITY)

    def acquire(self) -> Lease | None:
        """A slot for a task to write, or None while there is none to spare."""
        self._collect()
        slot = None
        while slot is None and self._free:
            slot = self._free.pop()  # the last one used: its pages are mapped, and fewer slots are in use
            if slot.capacity < self.capacity:
                self._discard(slot)
                slot = None
        if slot is None:
            if self.capacity == 0 or self._made == self._count:
                return None
            slot = self._make()
        array = slot.array()
        weakref.finalize(array, self._give_back, slot).atexit = False
        return Lease(torch.from_numpy(array), slot.offset)

    def has_free(self) -> bool:
        """Whether `acquire` would give a slot that is there."""
        self._collect()
        return bool(self._free)

    def has_spare(self) -> bool:
        """Whether `acquire` would give a slot."""
        return self.has_free() or self._made < self._count

    def close(self) -> None:
        """Lets go of the memory; leased slots stay valid until their tensors die."""
        if self._closed:
            return
        self._closed = True
        self._collect()
        while self._free:
            self._unlock(self._free.pop())
        self._made = self._count
        if self.fd is not None:
            os.close(self.fd)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()

    def _give_back(self, slot: Slot) -> None:
        if self._closed:
            self._unlock(slot)
        else:
            self._returned.append(slot)

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def _make(self) -> Slot:
        with full_machine_explained(f"making room for a batch of {self.capacity:,} bytes"):
            if self.fd is None and self._page_locked:
                # Whole pages, which no other slot lies in and which stay where they are when this process forks.
                slot = Slot(mmap.mmap(-1, self.capacity))
            elif self.fd is None:
                slot = Slot(np.empty(self.capacity, np.uint8))
            else:
                os.ftruncate(self.fd, self._end + self.capacity)
                slot = Slot(mmap.mmap(self.fd, self.capacity, offset=self._end), self._end)
        self._made, self._end = self._made + 1, self._end + self.capacity
        if self._page_locked:
            self._lock(slot)
        return slot

    def _discard(self, slot: Slot) -> None:
        """Gives the pages of a slot that has become too small back to the system."""
        self._unlock(slot)
        if self.fd is not None:
            slot.memory.madvise(mmap.MADV_REMOVE)
        self._made -= 1

    def _lock(self, slot: Slot) -> None:
        """Page-locks the slot, for copies to a GPU that nobody waits for; without that they are only slower."""
        try:
            address = slot.array().ctypes.data
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, slot.capacity, 0))
            slot.is_locked = True
        except RuntimeError as error:
            self._page_locked = False
            log.warning("batches cannot be page-locked, so copies to the GPU will be slower: %s", error)
            with suppress(RuntimeError):  # CUDA tells the thread's next kernel of the failure too: this one
                torch.zeros(1, device="cuda")

    def _unlock(self, slot: Slot) -> None:
        if slot.is_locked:
            slot.is_locked = False
            torch.cuda.cudart().cudaHostUnregister(slot.array().ctypes.data)
