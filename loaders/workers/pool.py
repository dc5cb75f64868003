"""The interface of every pool of workers, and what it reports: results of tasks, and deaths of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..timeline import Work
from .reader import Reading
from .slots import Lease
from .tasks import Task

WHOLE_BATCH = -2  # the row of a worker that reads a batch as a whole
NO_ROW = -1  # the row of a worker that reads nothing


class WorkerFailure(RuntimeError):
    """Several workers in a row died or hung while reading the same batch."""


class EngineError(RuntimeError):
    """An error that belongs to no batch: the tasks in flight are kept, and the next call may succeed."""


class PoolClosed(EngineError):
    """Another thread closed the loader meanwhile."""


class WorkerTimeout(EngineError):
    """A thread exceeded the timeout for its task, and threads cannot be restarted."""


class Result(NamedTuple):
    """What a worker made of a task. `payload` is the pool's own; `Pool.open` turns it into the batch."""

    number: int  # of the task
    payload: Any = None
    error: Any = None  # in place of the payload: an exception, or the pool's own form of one
    needed: int = 0  # bytes of the batch's tensors
    overflowed: bool = False  # the slot was too small for all of them
    is_pickled: bool = False  # some of them were sent inside the pickle
    work: Work = Work()


@dataclass
class Death:
    """A worker that died, or was killed because it hung. The dispatcher must retry its tasks that have no result."""

    worker: int
    reason: str  # in torch's words
    row: int  # that it was reading, or WHOLE_BATCH or NO_ROW


class Pool(Protocol):
    """Workers that read tasks. One thread at a time drives a pool; another may close it."""

    num_workers: int
    processes: list[Any] = []  # noqa: RUF012  # of a process pool
    writes_to_slots: bool = False  # if true, a batch may have to be copied out of its slot, when slots run short

    def begin(self) -> None:
        """Is called when an epoch begins, in its consumer's thread."""
        return None

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None) -> bool:
        """Sends a task to a worker, which writes its batch into the leased slot; False if its queue is full."""

    def receive(self) -> list[Result | Death]:
        """Waits for results and deaths. A worker that exceeds its time limit is killed, and reported as dead."""

    def open(self, result: Result, lease: Lease | None) -> Reading | BaseException:
        """Returns the batch of a result, in the leased slot, or the error that reading it raised."""
        reading: Reading = result.payload
        return reading

    def discard(self, result: Result) -> None:
        """Frees what an unwanted result holds."""
        return None

    def close(self) -> None:
        """Ends the workers."""
