"""num_workers=0: the thread that calls next() reads the batch."""

from __future__ import annotations

import signal
import threading
import traceback
from collections import deque
from functools import partial
from itertools import islice
from typing import Any

import torch

from ..randomness import preserved_globals
from ..timeline import WorkClock
from .batch_buffer import BatchBuffer
from .pool import Death, Pool, Result, answer
from .reader import Reader, Reading, warn_of_unseeded_reading
from .slots import Lease
from .tasks import Task


class InlinePool(Pool):
    """A pool whose one worker is the calling thread: `wait` reads the task."""

    num_workers = 1

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.events = deque[Result | Death]()
        self._tasks: dict[int, Task] = {}
        self._clock = WorkClock()
        self.begin()

    def begin(self) -> None:
        # The training loop's thread: there the global generators may be seeded and restored.
        self._thread = threading.get_ident()

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None, sent: list[Any]) -> bool:
        sent.append(True)
        self._tasks[number] = task
        return True

    def wait(self) -> None:
        self.events.extend(map(self._answer, islice(self._tasks.items(), 1)))

    def close(self) -> None:
        self._tasks.clear()
        self._reader.close()

    def _answer(self, numbered: tuple[int, Task]) -> Result:
        number, task = numbered
        result = answer(number, partial(self._read, task), None, self._clock, BaseException)
        if _is_from_a_signal(result.error):  # any other, such as the dataset's SystemExit, is the batch's: go on
            try:
                raise result.error
            finally:  # else the error and this frame, which its traceback refers to, would keep each other alive
                del result
        result = result._replace(overflowed=False)
        del self._tasks[number]  # no call from here on: until now, an interrupted reading is done again
        return result

    def _read(self, task: Task, buffer: BatchBuffer, reading: Reading) -> None:
        reader = self._reader
        if reader.spec is not None or reader.seed is None:
            reader.read(task, buffer, reading)
        elif threading.get_ident() == self._thread:
            threads = torch.get_num_threads()
            try:
                torch.set_num_threads(1)  # as in a worker process: sums would differ in their last bits
                with preserved_globals():  # the model's own draws must not change with the loader
                    reader.read(task, buffer, reading)
            finally:
                torch.set_num_threads(threads)
        else:
            warn_of_unseeded_reading()
            reader.read(task, buffer, reading, seeds=False)


def _is_from_a_signal(error: BaseException | None) -> bool:
    """Returns whether a signal handler raised the error: then the reading was interrupted, and is done again."""
    if error is None or isinstance(error, Exception):
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(one, "__code__", getattr(type(one).__call__, "__code__", None)) for one in handlers if one}
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, KeyboardInterrupt) or not codes.isdisjoint(frames)
