"""num_workers=0: each task is read in the thread that asks for its batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

from loaders.randomness import preserved_globals
from loaders.reading import Reader, Room, Task
from loaders.stats import Stats

log = logging.getLogger(__name__)


class Inline:
    """Reads as a Dispatcher delivers, without workers."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._thread = threading.current_thread()
        self.processes: list[Any] = []
        self.stats = Stats()
        self._tasks: Iterator[Task] = iter(())
        self._head: Task | None = None

    def begin(self, tasks: Iterator[Task]) -> None:
        self._tasks, self._head = tasks, None
        self._thread = threading.current_thread()

    def head(self) -> Task | None:
        if self._head is None:
            self._head = next(self._tasks, None)
        return self._head

    def next(self) -> Any:
        task, self._head = self._head, None
        reading = self._read(task)
        self.stats.count_skipped(reading.skipped)
        return reading.batch

    def close(self) -> None:
        self.begin(iter(()))

    def _read(self, task: Task) -> Any:
        self.stats.batches += 1
        room = Room()
        if self._reader.spec is not None or self._reader.seed is None:
            return self._reader.read(task, room)
        if threading.current_thread() is self._thread:  # that of the training loop
            with preserved_globals():  # the model's own draws must not notice
                return self._reader.read(task, room)
        warn_of_unseeded_reading()
        return self._reader.read(task, room, seeded=False)


@cache
def warn_of_unseeded_reading() -> None:
    log.warning(
        "samples are read in a thread, where the global generators cannot be seeded without disturbing the model's: "
        "random augmentation differs from run to run, unless the dataset has read_batch or worker processes read it"
    )
