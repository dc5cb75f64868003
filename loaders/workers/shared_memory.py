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
import platform
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

MAP_FAILED = ctypes.c_void_p(-1).value
MAP_POPULATE = 0x8000
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}  # the system call's number, for Pythons built without the function

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
    fd = _create_memfd()
    if fd is None:
        fd = _create_unlinked_file()
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _create_memfd() -> int | None:
    """Returns a memfd, or None where there is none: an old Python or kernel, or a sandbox that forbids it."""
    name = "loader"
    try:
        if hasattr(os, "memfd_create"):
            return os.memfd_create(name, os.MFD_CLOEXEC)
        number = MEMFD_CREATE.get(platform.machine())
        if number is None:
            return None
        fd = int(_libc.syscall(number, name.encode(), 1))  # 1 is MFD_CLOEXEC
        if fd < 0:
            raise OSError(ctypes.get_errno(), "memfd_create")
        return fd
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            return None
        raise


def _create_unlinked_file() -> int:
    """Returns a descriptor of a file without a name, in /dev/shm or the temporary folder, whichever has more room."""
    folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.access(folder, os.W_OK)]
    with tempfile.TemporaryFile(dir=max(folders, key=_free_bytes, default=None)) as file:
        return os.dup(file.fileno())


def _free_bytes(folder: str) -> int:
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize


class Mapping:
    """`size` bytes of a descriptor's memory, mapped into this process until the last array on them dies.

    `provide`: allocates the memory and maps all its pages at once, which is several times as fast as mapping each page
    when it is first touched. `private`: this process's writes stay its own. Raises OSError if no memory is left.
    """

    def __init__(self, fd: int, size: int, provide: bool = False, private: bool = False) -> None:
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        if provide:
            os.posix_fallocate(fd, 0, size)
            flags |= MAP_POPULATE
        self.size = size
        self.address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if self.address == MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.unmap = weakref.finalize(self, _libc.munmap, self.address, size)
        self.unmap.atexit = False

    def array(self) -> np.ndarray:
        """Returns the bytes, uint8 (size,), as a new array that keeps the mapping alive."""
        memory: Any = (ctypes.c_uint8 * self.size).from_address(self.address)
        memory.mapping = self
        return np.asarray(np.frombuffer(memory, np.uint8))


class SharedMemory:
    """A descriptor's memory and this process's mapping of it, which is made when it is first used.

    A forked child closes the descriptor, and unmaps the memory unless it `is_delivered`: then objects of the program
    may use it. So the kernel frees the memory as soon as those that use it have dropped it.
    """

    fd = -1
    _mapping: Mapping | None = None
    _all: ClassVar[weakref.WeakSet[SharedMemory]] = weakref.WeakSet()

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self.is_delivered = False
        self._all.add(self)

    def array(self, provide: bool = False) -> np.ndarray:
        """Returns the bytes, uint8 (size,), as a new array. Raises OSError if no memory is left."""
        if self._mapping is None:
            self._mapping = Mapping(self.fd, self.size, provide)
        return self._mapping.array()

    def before_unmapping(self, function: Callable[..., None], *args: Any) -> None:
        """Calls function(*args) when the last array on the mapped memory has died."""
        weakref.finalize(self._mapping, function, *args).atexit = False  # finalisers run newest first

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


class Forks:
    """Counts this process's forks: `count` is odd while one is under way, and goes up in parent and child."""

    count = 0

    @classmethod
    def step(cls) -> None:
        cls.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=Forks.step, after_in_parent=Forks.step, after_in_child=Forks.step)
    os.register_at_fork(after_in_child=SharedMemory.drop_in_child)


def write_shared(data: bytes | np.ndarray) -> int:
    """Returns the descriptor of new shared memory that holds `data`. Raises OSError if no memory is left."""
    size = data.nbytes if isinstance(data, np.ndarray) else len(data)
    fd = create_shared_memory(size)
    try:
        array = Mapping(fd, size, provide=True).array()
        flat = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1, order="A")
        array[:] = flat.view(np.uint8)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_shared(fd: int, private: bool = False) -> np.ndarray:
    """Maps all of a descriptor's memory, uint8 (size,); the descriptor may be closed then. `private`: see Mapping."""
    return Mapping(fd, os.fstat(fd).st_size, private=private).array()
