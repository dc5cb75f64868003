"""Records what a run's workers, preloader, device and training loop do and when, for a picture.

All times are those of time.perf_counter, which all processes of a machine share on Linux.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from .preload.accelerator import Accelerator

# The lanes of a timeline; each worker has one too, such as "worker 0".
TRAINING, PRELOADER, COPY_STREAM, GPU = "training loop", "preloader", "copy stream", "GPU"


class Work(NamedTuple):
    """When a worker began to read a batch, and how long it took, in seconds."""

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
        self._scheduler = _SchedulerClock()

    def begin(self) -> None:
        self._began, (self._cpu, self._queued) = time.perf_counter(), self._scheduler.read()

    def end(self, collate_seconds: float) -> Work:
        now, idle_from, began = time.perf_counter(), self._idle_from, self._began
        cpu, queued = self._scheduler.read()
        self._idle_from = now
        return Work(began, now - began, cpu - self._cpu, queued - self._queued, collate_seconds, began - idle_from)


class _SchedulerClock:
    """Tells how long the calling thread has computed, and how long it has waited for a core, in seconds.

    The second is 0 where the system does not tell it. A read takes about 2 us.
    """

    def __init__(self) -> None:
        self._thread, self._fd, self._owner = 0, -1, 0

    def read(self) -> tuple[float, float]:
        if self._thread != threading.get_native_id():  # of another thread, or of the process that forked this one
            self._close()
            self._thread, self._owner = threading.get_native_id(), os.getpid()
            with suppress(OSError):  # not Linux, or a sandbox
                self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        queued = b"0"
        with suppress(AttributeError, OSError, ValueError):  # Windows has no pread
            # Not the first value, the thread's time on a core: it changes only at the scheduler's ticks.
            _, queued, _ = os.pread(self._fd, 100, 0).split()
        return time.thread_time(), int(queued) / 1e9

    def _close(self) -> None:
        fd, self._fd = self._fd, -1  # first: an exception that interrupts this must not close it twice
        if fd >= 0 and self._owner == os.getpid():  # a forked child may have closed it, and opened another file
            with suppress(OSError):
                os.close(fd)

    def __reduce__(self) -> Any:
        """Makes a copy open its own file."""
        return _SchedulerClock, ()

    def __del__(self) -> None:
        self._close()


class Span(NamedTuple):
    """What one lane did from `start` to `end`, in seconds."""

    lane: str
    activity: str
    start: float
    end: float
    batch: tuple[int, int] | None  # the batch's epoch, and its number in the epoch


class Moment(NamedTuple):
    """A moment: the host's clock and, on a device with streams, an event with a time."""

    host: float
    event: Any

    def until(self, later: Moment) -> float:
        """Returns the seconds until a later moment, by the device's clock if there are events."""
        if self.event is not None:
            return float(self.event.elapsed_time(later.event)) / 1000
        return later.host - self.host


class Timeline:
    """Records spans until `close`, and keeps those that end after `begin`.

    Set it as the `timeline` of a loader and give it to a StepTimer; both add spans, from any thread.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._accelerator = Accelerator(device)
        self.delivered: tuple[int, int] | None = None  # the batch that the training loop received last
        self.start, self.end = 0.0, float("inf")  # of the recording
        self._spans: list[Span] = []
        self._device_spans: list[tuple[str, str, Moment, Moment, tuple[int, int] | None]] = []
        self._zero: Moment | None = None  # a moment on the host's clock and on the device's
        if self._accelerator.has_streams:
            self._accelerator.synchronize()
            event = self._accelerator.timed_event()
            event.synchronize()
            self._zero = Moment(time.perf_counter(), event)

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

    def add_between(
        self, lane: str, device_lane: str, activity: str, start: Moment, end: Moment, batch: tuple[int, int] | None
    ) -> None:
        """Adds what the host did between two moments and, if they have events, what the device did."""
        self.add(lane, activity, start.host, end.host, batch)
        if self.is_open and start.event is not None:
            self._device_spans.append((device_lane, activity, start, end, batch))

    def begin(self) -> None:
        """Begins the recording: spans that have ended by now are left out."""
        self.start = time.perf_counter()

    def close(self) -> None:
        """Ends the recording."""
        if self.is_open:
            self.end = time.perf_counter()

    def spans(self) -> list[Span]:
        """Returns the spans between `begin` and `close`, sorted by their start. Waits for the device."""
        spans = list(self._spans)
        if (zero := self._zero) is not None:
            self._accelerator.synchronize()
            for lane, activity, *moments, batch in self._device_spans:
                start, end = (zero.host + zero.until(moment) for moment in moments)
                spans.append(Span(lane, activity, start, end, batch))
        shown = [span for span in spans if span.end > self.start and span.start < self.end]
        return sorted(shown, key=lambda span: span.start)
