"""The interface of every pool of workers, and what it reports: results of tasks, and deaths of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..timeline import Work, WorkClock
from .batch_buffer import BatchBuffer
from .reader import Reading
from .slots import Lease
from .streams import Progress
from .tasks import Task

# What a worker is reading, if not a single row of a batch. NEVER_BEGAN: it exited by itself before its set-up.
# Numbers below SET_UP are samples that a stream drops to resume.
SET_UP, NEVER_BEGAN, WHOLE_BATCH, NO_ROW = -4, -3, -2, -1


class WorkerFailure(RuntimeError):
    """Several workers in a row died or hung while reading the same batch."""


class EngineError(RuntimeError):
    """An error that belongs to no batch: the tasks in flight are kept, and the next call may succeed."""


class PoolClosed(EngineError):
    """Another thread closed the loader while this one used it."""


class WorkerTimeout(EngineError):
    """A worker thread exceeded the timeout. Threads cannot be restarted."""


class Result(NamedTuple):
    """A worker's answer to a task."""

    number: int  # of the task
    payload: Any = None  # in a form that only the pool knows; `Pool.open` turns it into the batch
    error: Any = None  # instead of a payload: an exception, perhaps also in such a form
    needed: int = 0  # bytes of the batch's tensors
    overflowed: bool = False  # the slot was too small for all of the tensors
    is_pickled: bool = False  # torch had to take some of the tensors apart
    holds_slot: bool = False  # the worker, or a process that it forked, can still read what it wrote
    work: Work = Work()
    progress: Progress | None = None  # of a stream


@dataclass
class Death:
    """Reports that a worker died, or was killed because it hung. Its tasks without a result have to be retried."""

    worker: int
    reason: str  # in torch's words
    row: int  # what it was reading: a row, or one of the constants above


def answer(
    number: int,
    read: Callable[[BatchBuffer, Reading], None],
    slot: np.ndarray | None,
    clock: WorkClock,
    caught: type[BaseException] = Exception,
) -> Result:
    """Reads a batch in this process. If that raises an error of the kind `caught`, the result has it instead."""
    buffer, reading = BatchBuffer(slot), Reading()
    clock.begin()
    try:
        read(buffer, reading)
    except caught as error:  # not stored: its traceback refers to this frame, and this frame to the slot
        work = clock.end(reading.collate_seconds)
        return Result(number, None, error, buffer.needed, buffer.overflowed, work=work, progress=reading.progress)
    work = clock.end(reading.collate_seconds)
    return Result(number, reading, None, buffer.needed, buffer.overflowed, work=work, progress=reading.progress)


class Pool(Protocol):
    """Workers that read tasks. One thread at a time drives a pool; another may close it."""

    num_workers: int
    events: deque[Result | Death]  # what the workers reported; whoever drives the pool takes them out
    processes: list[Any] = []  # noqa: RUF012  # a process pool's
    writes_to_slots: bool = False  # if true, batches have to be copied out of their slots when slots run short

    def begin(self) -> None:
        """Is called by the consumer's thread when an epoch begins."""
        return None

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None, sent: list[Any]) -> bool:
        """Sends a task to a worker, which writes its batch into the leased slot; False if its queue is full.

        The call that sends the task also appends to `sent`. A task may be reported more than once.
        """

    def wait(self) -> None:
        """Waits until there are events. The pool kills a worker that exceeds its time limit, and reports its death.

        An exception from a signal handler loses nothing; the next call goes on.
        """

    def open(self, result: Result, lease: Lease | None) -> Reading | BaseException:
        """Returns a result's batch, whose tensors lie in the leased slot, or the error that reading it raised."""
        reading: Reading = result.payload
        return reading

    def close(self) -> None:
        """Ends the workers."""
