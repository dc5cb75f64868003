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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

MAP_FAILED = ctypes.c_void_p(-1).value
MADV_REMOVE = 9
MAP_POPULATE = 0x8000
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}  # the system call's number, for Pythons built without the function

ADVICE = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n), or lower num_workers",
    errno.ENFILE: "too many open files on this machine: lower num_workers",
    errno.EAGAIN: "no more processes are allowed here: raise the limit (ulimit -u), or lower num_workers",
    errno.ENOMEM: "out of memory: lower batch_size, num_workers or prefetch_factor",
    errno.ENOSPC: "out of memory: lower batch_size, num_workers or prefetch_factor",
}

if sys.platform == "linux":  # elsewhere there are no worker processes, but this file is imported
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


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
    os.ftruncate(fd, size)
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
    """`size` bytes at `offset` of a descriptor's memory, mapped into this process until the last array on it dies.

    `provide`: allocates the memory and maps all its pages at once, which is several times as fast as mapping each page
    when it is first touched. `is_last`: nobody reads the memory after this process, so unmapping it frees its pages,
    even if a process that was forked meanwhile has them mapped. Raises OSError if no memory is left.
    """

    def __init__(self, fd: int, offset: int, size: int, provide: bool = False, is_last: bool = False) -> None:
        flags = mmap.MAP_SHARED
        if provide:
            os.posix_fallocate(fd, offset, size)
            flags |= MAP_POPULATE
        self.size = size
        self.address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if self.address == MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        weakref.finalize(self, _unmap, self.address, size, os.getpid() if is_last else None).atexit = False

    def array(self) -> np.ndarray:
        """Returns the bytes, uint8 (size,), as a new array that keeps the mapping alive."""
        memory: Any = (ctypes.c_uint8 * self.size).from_address(self.address)
        memory.mapping = self
        return np.asarray(np.frombuffer(memory, np.uint8))

    def free_pages(self) -> None:
        """Returns the memory to the system, even if other processes have it mapped; they then read zeros."""
        _libc.madvise(self.address, self.size, MADV_REMOVE)


def _unmap(address: int, size: int, frees_in: int | None) -> None:
    if frees_in == os.getpid():
        _libc.madvise(address, size, MADV_REMOVE)
    _libc.munmap(address, size)


def write_shared(data: bytes | np.ndarray) -> int:
    """Returns the descriptor of new shared memory that holds `data`. Raises OSError if no memory is left."""
    size = data.nbytes if isinstance(data, np.ndarray) else len(data)
    fd = create_shared_memory(size)
    try:
        array = Mapping(fd, 0, size, provide=True).array()
        array[:] = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
    except BaseException:
        os.close(fd)
        raise
    return fd


def drop_shared(fd: int) -> None:
    """Closes a descriptor and frees its memory, even if a process that was forked meanwhile has the descriptor too."""
    try:
        with suppress(OSError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def read_shared(fd: int, is_last: bool = False) -> np.ndarray:
    """Maps all of a descriptor's memory, uint8 (size,), and closes the descriptor. `is_last`: see Mapping."""
    try:
        return Mapping(fd, 0, os.fstat(fd).st_size, is_last=is_last).array()
    finally:
        with suppress(OSError):
            os.close(fd)
