"""How a dataset reaches workers that are not forked: pickled, but for its large arrays, which go as shared memory."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from multiprocessing import reduction
from typing import Any

import numpy as np

from loaders.reading import Reader

LARGE = 1 << 20  # bytes of an array that is not copied


class Carried:
    """What a worker that is not forked is given, pickled so that large arrays go over as shared memory, not as copies.

    Must be pickled by Process.start(): only then can descriptors be sent along. (Tensors are shared by torch itself.)
    """

    def __init__(self, reader: Reader, memory_fd: int) -> None:
        self.reader, self.memory_fd = reader, memory_fd

    def __reduce__(self) -> Any:
        buffer = io.BytesIO()
        pickler = reduction.ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {**pickler.dispatch_table, np.ndarray: _share_array}
        try:
            pickler.dump(self.reader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _name_unpicklable(self.reader, error) from error
        return _arrive, (buffer.getvalue(), reduction.DupFd(self.memory_fd))


def _arrive(pickled: bytes, memory: Any) -> tuple[Reader, int]:
    return pickle.loads(pickled), memory.detach()


def _share_array(array: np.ndarray) -> Any:
    if array.nbytes < LARGE or array.dtype.hasobject or type(array) is not np.ndarray:
        return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    fd = os.memfd_create("loader-dataset", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, array.nbytes)
    with mmap.mmap(fd, array.nbytes) as memory:
        np.frombuffer(memory, array.dtype)[:] = array.reshape(-1)
    return _rebuild_array, (reduction.DupFd(fd), array.dtype, array.shape)


def _rebuild_array(memory: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    fd = memory.detach()
    array = np.frombuffer(mmap.mmap(fd, 0), dtype).reshape(shape)
    os.close(fd)
    return array


def _name_unpicklable(reader: Reader, error: Exception) -> TypeError:
    """Says which attribute of the dataset, or which other argument, stands in the way."""
    parts = {f"dataset.{name}": value for name, value in getattr(reader.dataset, "__dict__", {}).items()}
    for name, part in {**parts, "dataset": reader.dataset, "collate_fn": reader.collate_fn}.items():
        try:
            reduction.ForkingPickler.dumps(part)
        except Exception as cause:
            return TypeError(
                f"{name} ({part!r}) cannot be pickled, and workers that are not forked need that: make it a "
                f"module-level function or class, or use multiprocessing_context='fork' ({cause})"
            )
    return TypeError(f"the dataset cannot be pickled, and workers that are not forked need that: {error}")
