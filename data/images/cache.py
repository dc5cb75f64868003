"""data.cache: decoded images that the processes of a machine share, in memory or in a file, for later epochs.

The file has the end of what is written, a record per image, and the images. Its size is the limit: bytes that are not
written take no space.
Invariant: each image is written to bytes that no other writer uses, because the cache's end moves on, under a lock,
before the image is written. Its record is written last: the file's size and time of change, a checksum of the image,
and a checksum of the record and the file's path. So nothing that a killed writer, a full disk or a changed file leaves
behind is used: the record does not match, and the image is read from its file. It is resized in the same way then, so
a sample does not depend on what is stored.
"""

import logging
import mmap
import os
import shutil
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, explained, home_path
from loaders import available_memory, local_ranks

with suppress(ImportError):  # not on Windows
    import fcntl

log = logging.getLogger(__name__)

END = struct.Struct("<Q")  # where the next image is written
RECORD = struct.Struct("<QQQIIII")  # offset, the file's size and time, height, width, two checksums
SHARE_OF_MEMORY = 0.25  # of the available memory, for the training and the test set each
SHARE_OF_DISK = 0.9  # of the free space
FOLDER = "~/.cache/training_images"


class Cache:
    """Room for `count` images, which this process makes, or which others on this machine have made.

    kind: "ram" or "disk". folder: has the file, or a link to the memory; None: FOLDER. name: stands for the set of
    files and how they are stored. gigabytes: the limit; None: a share of what is free. Raises DataError if this
    machine cannot provide the cache.
    """

    def __init__(
        self, kind: str, folder: str | None, name: str, count: int, gigabytes: float | None, is_copy: bool = False
    ) -> None:
        self._arguments = (kind, folder, name, count, gigabytes)
        # The hash of each image's record, once the image is verified: forked workers verify an image once for all.
        self._verified = np.frombuffer(mmap.mmap(-1, count * 8), np.int64)
        if not hasattr(os, "memfd_create"):
            raise DataError(f"data.cache={kind}: it needs Linux; set it to null")
        with explained(
            f"data.cache={kind}: {folder or FOLDER} cannot be used", "set data.cache_dir to a folder of this machine"
        ):
            path = home_path(folder or FOLDER)
            path.mkdir(parents=True, exist_ok=True)
            with (path / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if kind == "ram":
                    self._fd = shared_memory(path / f"{name}-{os.uname().nodename}.ram")
                else:
                    self._fd = os.open(path / f"{name}.disk", os.O_RDWR | os.O_CREAT, 0o666)
                weakref.finalize(self, os.close, self._fd)
                begin = END.size + count * RECORD.size
                if not is_copy or os.fstat(self._fd).st_size < begin:
                    self._set_size(begin, path)
            self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)

    def _set_size(self, begin: int, path: Path) -> None:
        kind, _, _, _, gigabytes = self._arguments
        with self._locked() as (end, _):
            end = max(end, begin)
            if gigabytes is not None:
                size = int(gigabytes * 1e9)
            elif kind == "ram":
                size = end + int(SHARE_OF_MEMORY * (available_memory() or 0) * local_ranks())
            else:
                size = end + int(SHARE_OF_DISK * shutil.disk_usage(path).free)
            os.ftruncate(self._fd, max(end, size))
            os.pwrite(self._fd, END.pack(end), 0)

    @contextmanager
    def _locked(self) -> Iterator[tuple[int, int]]:
        """Yields the end and the size. No other process or thread changes them during the block."""
        # A lock belongs to an open file, which forked processes and threads share: so it is opened anew.
        with open(f"/proc/self/fd/{self._fd}", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (end,) = END.unpack(os.pread(self._fd, END.size, 0).ljust(END.size, b"\0"))
            yield end, os.fstat(self._fd).st_size

    def image(self, index: int, path: str, pixels: Callable[[bytes, str], np.ndarray]) -> np.ndarray:
        """The image (H, W, 3) of the file at `path`: the stored one, else `pixels` of its bytes, to store."""
        image = self.read(index, path, os.stat(path))
        if image is None:
            with open(path, "rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                data = file.read()
            image = pixels(data, path)
            self.store(index, path, stat, image)
        return image

    def read(self, index: int, path: str, stat: os.stat_result) -> np.ndarray | None:
        """The image (H, W, 3) of the file at `path`, if it is stored and the file has not changed since (`stat`)."""
        start = END.size + index * RECORD.size
        data = self._map[start : start + RECORD.size]
        offset, size_of_file, time_of_file, height, width, checksum, _ = RECORD.unpack(data)
        if size_of_file != stat.st_size or time_of_file != stat.st_ctime_ns:
            return None
        size = height * width * 3
        if offset + size > len(self._map):  # the cache has grown since this process opened it
            return None
        image = np.frombuffer(self._map, np.uint8, size, offset)
        if self._verified[index] != hash(data):
            if data != record(path, stat, offset, height, width, checksum) or zlib.crc32(image.data) != checksum:
                return None
            self._verified[index] = hash(data)
        return image.reshape(height, width, 3)

    def store(self, index: int, path: str, stat: os.stat_result, image: np.ndarray) -> None:
        """Stores the image of a file. `stat` is from before the file was read. Logs if there is no room."""
        if self.read(index, path, stat) is not None:  # another process has stored it while this one decoded it
            return
        try:
            with self._locked() as (end, size):
                if end == size:
                    return
                if end + image.nbytes > size:
                    raise OSError(ENOSPC, "data.cache_gb, or its share of what was free, is used up")
                os.pwrite(self._fd, END.pack(end + image.nbytes), 0)
            write_at(self._fd, end, image.data.cast("B"))
            height, width, _ = image.shape
            data = record(path, stat, end, height, width, zlib.crc32(image.data))
            write_at(self._fd, END.size + index * RECORD.size, memoryview(data))
            self._verified[index] = hash(data)
        except OSError as error:
            self._say_full(str(error.strerror))

    def _say_full(self, reason: str) -> None:
        with suppress(OSError), self._locked() as (end, size):
            os.ftruncate(self._fd, end)
            if end < size:
                log.warning(
                    "data.cache: %s: nothing more is stored, and further images are read from their files", reason
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (*self._arguments, True)


def shared_memory(link: Path) -> int:
    """The descriptor of the memory that `link` leads to, if a process still has it; else of new memory."""
    name = f"images-{link.stem}"
    with suppress(OSError):  # the process that made it has ended
        if os.readlink(os.readlink(link)).startswith(f"/memfd:{name} "):
            return os.open(link, os.O_RDWR)
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    link.unlink(missing_ok=True)
    link.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    return fd


def record(path: str, stat: os.stat_result, offset: int, height: int, width: int, checksum: int) -> bytes:
    """The record of an image. It has the file's ctime, because programs can set the mtime back."""
    fields = (offset, stat.st_size, stat.st_ctime_ns, height, width, checksum)
    own_checksum = zlib.crc32(os.fsencode(path), zlib.crc32(RECORD.pack(*fields, 0)))
    return RECORD.pack(*fields, own_checksum)


def write_at(fd: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data = data[count:]
        offset += count
