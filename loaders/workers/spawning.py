"""Sends a dataset to workers that are not forked: as a pickle, with its large arrays in shared memory."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, Literal

import numpy as np

from .reader import Reader
from .shared_memory import read_shared, write_shared

LARGE = 1 << 20  # arrays of at least so many bytes are shared instead of pickled


class SpawnedReader:
    """Wraps a reader, so that Process.start() can pickle it for each worker of a pool.

    A large array is put into shared memory once, when the first worker starts. (Torch itself shares tensors.) In the
    worker it is unpickled as a pair: the Reader, and the descriptor of Control's memory.
    """

    def __init__(self, reader: Reader, memory_fd: int, init_fn: Callable[[int], None] | None) -> None:
        self._reader, self._memory_fd, self._init_fn = reader, memory_fd, init_fn
        self._shared: dict[int, tuple[np.ndarray, int]] = {}  # by id: the array, and the descriptor of its memory

    def __reduce__(self) -> Any:
        buffer = io.BytesIO()
        pickler = reduction.ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {**pickler.dispatch_table, np.ndarray: self._reduce_array}
        try:
            pickler.dump(self._reader)
            reduction.ForkingPickler.dumps(self._init_fn)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _name_unpicklable(self._reader, self._init_fn, error) from error
        return _unpickle, (buffer.getvalue(), reduction.DupFd(self._memory_fd))

    def close(self) -> None:
        """Closes the descriptors of the shared arrays."""
        for _, fd in self._shared.values():
            os.close(fd)
        self._shared.clear()

    def _reduce_array(self, array: np.ndarray) -> Any:
        if array.nbytes < LARGE or array.dtype.hasobject:
            return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if id(array) not in self._shared:
            self._shared[id(array)] = array, write_shared(array)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        return _rebuild_array, (reduction.DupFd(self._shared[id(array)][1]), array.dtype, array.shape, order)


def _unpickle(pickled: bytes, memory: Any) -> tuple[Reader, int]:
    return pickle.loads(pickled), memory.detach()


def _rebuild_array(memory: Any, dtype: np.dtype, shape: tuple[int, ...], order: Literal["C", "F"]) -> np.ndarray:
    # Private: each worker may write to its array, as it may to one that was pickled.
    fd = memory.detach()
    try:
        return read_shared(fd, private=True).view(dtype).reshape(shape, order=order)
    finally:
        os.close(fd)


def _name_unpicklable(reader: Reader, init_fn: Callable[[int], None] | None, error: Exception) -> TypeError:
    """Returns an error that names the attribute of the dataset, or the argument, that cannot be pickled."""
    parts = {f"dataset.{name}": value for name, value in getattr(reader.dataset, "__dict__", {}).items()}
    arguments = {"dataset": reader.dataset, "collate_fn": reader.collate_fn, "worker_init_fn": init_fn}
    for name, part in {**parts, **arguments}.items():
        try:
            reduction.ForkingPickler.dumps(part)
        except Exception as cause:
            return TypeError(
                f"{name} ({part!r}) cannot be pickled, and workers that are not forked need that: make it a "
                f"module-level function or class, or use multiprocessing_context='fork' ({cause})"
            )
    return TypeError(f"the dataset cannot be pickled, and workers that are not forked need that: {error}")
