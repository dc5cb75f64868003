"""Gives the tasks of streams to their workers, and opens the streams of a worker that died where they were."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from ..base import Delivery
from .dispatcher import Dispatcher
from .in_flight import InFlight
from .pool import Death, Result, WorkerFailure
from .streams import Progress, StreamTask, StreamTasks

log = logging.getLogger(__name__)


class StreamDispatcher(Dispatcher):
    """Keeps tasks of streams in flight. The empty ones of streams at their end are dropped, and so not delivered."""

    _streams: StreamTasks

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._begun: dict[int, bytes | None] = {}  # digests of the streams' first samples; empty: of none

    def begin(self, tasks: Iterator[Any]) -> None:
        """Drops the tasks in flight, and continues with those of a StreamTasks."""
        assert isinstance(tasks, StreamTasks)
        self._drop()  # what is in flight belongs to the streams before
        self._streams = tasks
        super().begin(tasks)

    def next(self, epoch: int | None = None) -> Delivery | None:
        """Waits for the next batch, and returns it, as Dispatcher does; None if all streams have ended."""
        return super().next(self._streams.epoch)

    def _choose_worker(self, number: int, task: StreamTask) -> int:
        return task.host % self._pool.num_workers

    def _send(self, number: int, flight: InFlight) -> bool:
        self._streams.open(flight)
        return super()._send(number, flight)

    def _note(self, result: Result) -> None:
        flight, progress = self._in_flight.get(result.number), result.progress
        if flight is not None and flight.is_wanted and flight.result is None:
            self._streams.answered(flight.task.stream, progress)
            if progress is not None and progress.is_empty:
                flight.is_wanted, self._has_unsent = False, True
            if progress is not None and self._streams.epoch is not None:  # with a seed, which `streams` belongs to
                self._tell(progress)
        super()._note(result)

    def _tell(self, progress: Progress) -> None:
        """Says what a stream's answer tells of the dataset."""
        stream, place = progress.stream, progress.place
        if progress.dropped is not None:
            log.info("stream %d read and dropped %d samples in %.1f s, to resume", stream, *progress.dropped)
        if stream in self._begun:
            return
        is_empty = progress.is_empty and place is not None and not place.samples + place.taken
        self._begun[stream] = b"" if is_empty else progress.digest
        if len(self._begun) < len(self._streams.places):
            return
        digests = [digest for digest in self._begun.values() if digest]
        if twins := sorted(one for one, digest in self._begun.items() if digest and digests.count(digest) > 1):
            _warn_once(
                f"streams {', '.join(map(str, twins))} begin with the same samples: the dataset's __iter__ has to "
                "give each its share, by the id and num_workers of torch.utils.data.get_worker_info()"
            )
        empty = sorted(one for one, digest in self._begun.items() if digest == b"")
        if 0 < len(empty) < len(self._begun):
            _warn_once(f"streams {', '.join(map(str, empty))} have no samples: set streams={min(empty)} or less")

    def _retry(self, death: Death) -> None:
        super()._retry(death)
        self._streams.restart(death.worker, self._pool.num_workers)
        flights = [(number, flight) for number, flight in self._in_flight.items() if flight.is_wanted]
        for _, failed in flights:
            if failed.result is None or not isinstance(failed.result.error, WorkerFailure):
                continue
            self._streams.answered(failed.task.stream, Progress(failed.task.stream, is_over=True))
            for number, flight in flights:
                if flight.task.stream == failed.task.stream and flight.result is None:
                    self._in_flight.pop(number, None)


@cache
def _warn_once(sentence: str) -> None:
    log.warning(sentence)
