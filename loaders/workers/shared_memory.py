"""Shared memory without a name: a memfd, or an unlinked file on systems that have no memfd.

A memfd is not limited by the size of /dev/shm, leaves nothing behind when its processes are killed, and needs no
resource tracker. It is mapped by the C library, because Python's mmap (before 3.13) duplicates the descriptor for each
mapping, and a process may only have a limited number of them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

MAP_FAILED = ctypes.c_void_p(-1).value
MAP_POPULATE = 0x8000

ADVICE = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n), or lower num_workers",
    errno.ENFILE: "too many open files on this machine: lower num_workers",
    errno.EAGAIN: "no more processes are allowed here: raise the limit (ulimit -u), or lower num_workers",
    errno.ENOMEM: "out of memory: lower batch_size, num_workers or prefetch_factor",
    errno.EFBIG: "the batch is larger than a file may be: raise the limit (ulimit -f), or lower batch_size",
    errno.ENOSPC: "out of memory: lower batch_size, num_workers or prefetch_factor",
}

if sys.platform == "linux":  # elsewhere there are no worker processes, but this file is imported
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class MachineFull(RuntimeError):
    """The machine has no memory, descriptor or process left for a loader; the message says what would help."""


def align(size: int, to: int) -> int:
    """Rounds up to a multiple of `to`."""
    return -(-size // to) * to


def page_aligned(size: int) -> int:
    return align(size, mmap.ALLOCATIONGRANULARITY)


@contextmanager
def full_machine_explained(doing: str) -> Iterator[None]:
    """Raises MachineFull for an OSError which says that memory, descriptors or processes are used up."""
    try:
        yield
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        raise MachineFull(f"{doing} failed: {ADVICE[error.errno]}") from error


def create_shared_memory(size: int) -> int:
    """Returns a descriptor of `size` bytes, which take no memory until they are mapped or written."""
    try:
        fd = os.memfd_create("loader", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:  # an old Python or kernel, or a sandbox that forbids it
        if getattr(error, "errno", None) in ADVICE:
            raise
        folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.access(folder, os.W_OK)]
        roomiest = max(folders, key=lambda folder: shutil.disk_usage(folder).free, default=None)
        with tempfile.TemporaryFile(dir=roomiest) as file:  # it has no name
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, provide: bool = False, private: bool = False) -> Any:
    """Maps a descriptor's memory until the last array on it dies: see `array_on`. The descriptor may be closed then.

    provide: allocates the memory and maps all its pages at once, which is several times as fast as mapping each page
    when it is first touched. private: this process's writes stay its own. Raises OSError if no memory is left.
    """
    size, flags = os.fstat(fd).st_size, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    if provide:
        os.posix_fallocate(fd, 0, size)
        flags |= MAP_POPULATE
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    mapping: Any = (ctypes.c_uint8 * size).from_address(address)
    mapping.unmap = weakref.finalize(mapping, _libc.munmap, address, size)
    mapping.unmap.atexit = False
    return mapping


def array_on(memory: Any) -> np.ndarray:
    """Returns all bytes of a mapping or an array, uint8 (size,), as a new array that keeps the memory alive."""
    return np.asarray(np.frombuffer(memory, np.uint8))


class SharedMemory:
    """A descriptor, and this process's mapping of its memory, which is made when it is first used.

    A forked child closes the descriptor, and unmaps the memory unless it `is_delivered`: then objects of the program
    may use it. So the kernel frees the memory as soon as those that use it have dropped it.
    """

    fd = -1
    is_delivered = False
    _mapping: Any = None
    _all: ClassVar[weakref.WeakSet[SharedMemory]] = weakref.WeakSet()

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._all.add(self)

    def array(self, provide: bool = False) -> np.ndarray:
        """Returns the bytes, uint8 (size,), as a new array. Raises OSError if no memory is left."""
        if self._mapping is None:
            self._mapping = map_memory(self.fd, provide)
        return array_on(self._mapping)

    def before_unmapping(self, call: Callable[..., None], *args: Any) -> None:
        """Calls call(*args) when the last array on the memory has died, before it is unmapped."""
        # The newest finalizer runs first. An array's own would be too late: numpy 2.5 drops its memory before that.
        weakref.finalize(self._mapping, call, *args).atexit = False

    def close(self) -> None:
        """Closes the descriptor; the memory stays mapped until the last array on it dies."""
        fd, self.fd, self._mapping = self.fd, -1, None
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    @classmethod
    def drop_in_child(cls) -> None:
        """Runs in a forked child."""
        for memory in list(cls._all):
            if memory._mapping is not None and not memory.is_delivered:
                memory._mapping.unmap()
            memory.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SharedMemory.drop_in_child)


def write_shared(data: bytes | np.ndarray) -> int:
    """Returns the descriptor of new shared memory that holds `data`. Raises OSError if no memory is left."""
    flat = array_on(data)
    fd = create_shared_memory(len(flat))
    try:
        array_on(map_memory(fd, provide=True))[:] = flat
    except BaseException:
        os.close(fd)
        raise
    return fd
