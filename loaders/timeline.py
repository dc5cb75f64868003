"""What a run's workers, preloader, device and training loop did and when: recorded for a while, for a picture.

All times are those of time.perf_counter, which all processes of a machine share on Linux.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch

TRAINING, PRELOADER, COPY_STREAM, GPU = "training loop", "preloader", "copy stream", "GPU"  # lanes, beside "worker 0"


class Work(NamedTuple):
    """When a worker began to read a batch, and what it took, in seconds."""

    began: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # in which its thread computed
    queued_seconds: float = 0.0  # in which it waited for a core; in the rest it waited for a disk or a lock
    collate_seconds: float = 0.0  # at the end, part of `seconds`
    wait_seconds: float = 0.0  # since it finished the batch before


class WorkClock:
    """Times a worker's batches; a thread may use its own clock only."""

    def __init__(self) -> None:
        self._idle_from = time.perf_counter()
        self._scheduler = _SchedulerClock()

    def begin(self) -> None:
        self._began, (self._cpu, self._queued) = time.perf_counter(), self._scheduler.read()

    def end(self, collate_seconds: float) -> Work:
        now, idle_from, began = time.perf_counter(), self._idle_from, self._began
        cpu, queued = self._scheduler.read()
        self._idle_from = now
        return Work(began, now - began, cpu - self._cpu, queued - self._queued, collate_seconds, began - idle_from)


class _SchedulerClock:
    """How long the calling thread has computed, and how long it was ready to and had no core, in seconds.

    The latter is 0 where the system does not tell. A read takes about 2 us.
    """

    def __init__(self) -> None:
        self._thread, self._fd, self._owner = 0, -1, 0

    def read(self) -> tuple[float, float]:
        if self._thread != threading.get_native_id():  # in a forked process too
            self._open()
        queued = b"0"
        with suppress(OSError, ValueError):
            _, queued, _ = os.pread(self._fd, 100, 0).split()  # the first is as old as the last scheduler tick
        return time.thread_time(), int(queued) / 1e9

    def _open(self) -> None:
        self.__del__()
        self._thread, self._fd, self._owner = threading.get_native_id(), -1, os.getpid()
        with suppress(OSError):  # no Linux, or a sandbox
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def __reduce__(self) -> Any:
        """Makes a copy open its own file."""
        return _SchedulerClock, ()

    def __del__(self) -> None:
        if self._fd >= 0 and self._owner == os.getpid():  # a forked child may have closed it, and opened another
            with suppress(OSError):
                os.close(self._fd)


class Span(NamedTuple):
    """What one lane did from `start` to `end`, in seconds."""

    lane: str
    activity: str
    start: float
    end: float
    batch: tuple[int, int] | None  # its epoch and its number there


class Timeline:
    """Records spans from the start of a run, until `close`; keeps those that end after `begin`.

    Loaders and a StepTimer that have a timeline add to it, in any thread.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.delivered: tuple[int, int] | None = None  # the batch that the training loop received last
        self.start, self.end = 0.0, float("inf")  # what is recorded
        self._spans: list[Span] = []
        self._device_spans: list[tuple[str, str, Any, Any, tuple[int, int] | None]] = []
        self._zero: tuple[float, Any] | None = None  # the same moment on the host's clock and on the device's
        if torch.device(device).type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            event.record()
            event.synchronize()
            self._zero = time.perf_counter(), event

    @property
    def is_open(self) -> bool:
        return self.end == float("inf")

    def add(self, lane: str, activity: str, start: float, end: float, batch: tuple[int, int] | None) -> None:
        if self.is_open:
            self._spans.append(Span(lane, activity, start, end, batch))

    def add_work(self, lane: str, work: Work, epoch: int | None, number: int | None) -> None:
        """Adds a worker's batch: its reading, and then its collating."""
        batch = None if epoch is None or number is None else (epoch, number)
        end = work.began + work.seconds
        self.add(lane, "read", work.began, end - work.collate_seconds, batch)
        if work.collate_seconds:
            self.add(lane, "collate", end - work.collate_seconds, end, batch)

    def add_device(self, lane: str, activity: str, start: Any, end: Any, batch: tuple[int, int] | None) -> None:
        """Adds what a GPU did between two of its events, which need enable_timing."""
        if self.is_open:
            self._device_spans.append((lane, activity, start, end, batch))

    def begin(self) -> None:
        """Drops what has ended: from now on everything is kept."""
        self.start = time.perf_counter()

    def close(self) -> None:
        """Ends the recording."""
        if self.is_open:
            self.end = time.perf_counter()

    def spans(self) -> list[Span]:
        """Returns all that was going on between `begin` and `close`, in the order of time. Waits for the device."""
        spans = list(self._spans)
        if self._zero is not None:
            torch.cuda.synchronize()
            host, zero = self._zero
            for lane, activity, *events, batch in self._device_spans:
                start, end = (host + zero.elapsed_time(event) / 1000 for event in events)
                spans.append(Span(lane, activity, start, end, batch))
        shown = [span for span in spans if span.end > self.start and span.start < self.end]
        return sorted(shown, key=lambda span: span.start)
