"""Times what a worker does: reading a batch, and waiting for the next task."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


class Work(NamedTuple):
    """When a worker began to read a batch (time.perf_counter), and how long it took, in seconds."""

    began: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # the part in which its thread computed
    queued_seconds: float = 0.0  # the part in which it waited for a core; in the rest it waited for a disk or a lock
    collate_seconds: float = 0.0  # the part, at the end, in which it collated
    wait_seconds: float = 0.0  # between the batch before and this one


class WorkClock:
    """Times a worker's batches. Each thread needs its own."""

    def __init__(self) -> None:
        self._idle_from = time.perf_counter()
        self._thread = 0  # the native id of the thread that `_file` belongs to
        self._file = -1
        self._owner = 0  # the process that opened the file

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._cpu, self._queued = self._scheduled()

    def end(self, collate_seconds: float) -> Work:
        now = time.perf_counter()
        began = self._began
        waited = began - self._idle_from
        self._idle_from = now
        cpu, queued = self._scheduled()
        return Work(began, now - began, cpu - self._cpu, queued - self._queued, collate_seconds, waited)

    def _scheduled(self) -> tuple[float, float]:
        """Returns how long the calling thread has computed, and how long it has waited for a core, in seconds.

        The second is 0 where the system does not tell it. This takes about 2 us.
        """
        if self._thread != threading.get_native_id():  # another thread made it, or the process that forked this one
            self.__del__()
            self._thread = threading.get_native_id()
            self._owner = os.getpid()
            with suppress(OSError):  # not Linux, or a sandbox
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        queued = b"0"
        with suppress(AttributeError, OSError, ValueError):  # Windows has no pread
            # Not the first value, the thread's time on a core: it changes only at the scheduler's ticks.
            _, queued, _ = os.pread(self._file, 100, 0).split()
        return time.thread_time(), int(queued) / 1e9

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # the system closes it, and the names of modules may be gone: so it is an argument
            return
        file = self._file
        self._file = -1  # first: an exception that interrupts this must not close the file twice
        if file >= 0 and self._owner == os.getpid():  # a forked child may have closed it, and opened another file
            with suppress(OSError):
                os.close(file)
