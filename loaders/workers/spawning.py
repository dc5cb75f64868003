"""Sends a set-up to workers that are not forked: as a pickle, with the dataset's large arrays in shared memory."""

from __future__ import annotations

import io
import os
import pickle
from multiprocessing import reduction
from typing import Any

import numpy as np

from .process_main import Setup
from .shared_memory import array_on, map_memory, write_shared

LARGE = 1 << 20  # arrays of at least so many bytes are shared instead of pickled


class SpawnedSetup:
    """Wraps a set-up, so that Process.start() can pickle it for each worker of a pool; it arrives as a Setup.

    It is one pickle: a worker_init_fn that is a method of the dataset has the dataset that is read. A large array is
    put into shared memory once, when the first worker starts. (Torch itself shares tensors.)
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._shared: dict[tuple[int, int], tuple[np.ndarray, int]] = {}  # by place: an array, and its descriptor

    def __reduce__(self) -> Any:
        file, descriptors = io.BytesIO(), list[Any]()

        def share(buffer: pickle.PickleBuffer) -> bool:
            """Returns whether the buffer is small, and so is pickled."""
            if buffer.raw().nbytes < LARGE:
                return True
            array = array_on(buffer)
            place = array.ctypes.data, array.nbytes
            if place not in self._shared:
                self._shared[place] = array, write_shared(array)
            descriptors.append(reduction.DupFd(self._shared[place][1]))
            return False

        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=share)
        pickler.dispatch_table = reduction.ForkingPickler(file).dispatch_table
        pickler.dump(self._setup)
        return _unpickle, (file.getvalue(), descriptors)

    def close(self) -> None:
        """Closes the descriptors of the shared arrays."""
        while self._shared:  # an exception that interrupts this must not close one twice
            os.close(self._shared.popitem()[1][1])


def _unpickle(pickled: bytes, descriptors: list[Any]) -> Setup:
    arrays = []
    for descriptor in descriptors:
        fd = descriptor.detach()
        try:
            arrays.append(array_on(map_memory(fd, private=True)))  # a worker may write to its array
        finally:
            os.close(fd)
    setup: Setup = pickle.loads(pickled, buffers=arrays)
    return setup


def name_unpicklable(setup: Setup, error: Exception) -> Exception:
    """Returns an error of the same kind that names the attribute of the dataset, or the argument, to be changed."""
    reader = setup.reader
    kind = type(error) if isinstance(error, (AttributeError, pickle.PicklingError)) else TypeError
    parts = {f"dataset.{name}": value for name, value in getattr(reader.dataset, "__dict__", {}).items()}
    arguments = {"dataset": reader.dataset, "collate_fn": reader.collate_fn, "worker_init_fn": setup.init_fn}
    for name, part in {**parts, **arguments}.items():
        try:
            reduction.ForkingPickler.dumps(part)
        except RuntimeError:  # a lock, for example, can be pickled only while a process starts
            continue
        except Exception as cause:
            return kind(
                f"{name} ({part!r}) cannot be pickled, and workers that are not forked need that: make it a "
                f"module-level function or class, or use multiprocessing_context='fork' ({cause})"
            )
    return kind(f"the dataset cannot be pickled, and workers that are not forked need that: {error}")
