"""What every pool of workers does for the dispatcher, and what it reports: results of tasks, and deaths of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .reader import Reading
from .slots import Lease
from .tasks import Task

WHOLE_BATCH = -2  # the row of a worker that reads a batch as a whole
NO_ROW = -1  # the row of a worker that reads nothing


class WorkerFailure(RuntimeError):
    """Workers died or hung again and again while reading one batch."""


class EngineError(RuntimeError):
    """Concerns no batch: what is in flight stays as it is, and the next call may succeed."""


class PoolClosed(EngineError):
    """Another thread closed the loader in the meantime."""


class WorkerTimeout(EngineError):
    """A thread takes longer for its task than it may, and threads cannot be replaced."""


class Result(NamedTuple):
    """What a worker made of a task. `payload` is the pool's own; `Pool.open` turns it into the batch."""

    number: int  # of the task
    payload: Any = None
    error: Any = None  # in place of the payload: an exception, or the pool's own form of one
    needed: int = 0  # bytes of the batch's tensors
    overflowed: bool = False  # the slot had no room for all of them
    is_pickled: bool = False  # some of them travelled inside a pickle
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass
class Death:
    """A worker that died, or was killed because it hung. Its tasks without a result have to be retried."""

    worker: int
    reason: str  # in torch's words
    row: int  # of the batch that it was reading, or WHOLE_BATCH or NO_ROW


class Pool(Protocol):
    """Workers that read tasks. One thread at a time drives a pool; another may close it."""

    num_workers: int
    processes: list[Any]  # of a process pool, else empty
    writes_to_slots: bool  # and so a batch may have to be copied out of its slot when slots run short

    def begin(self) -> None:
        """Is called when an epoch begins, in the thread of its consumer."""

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None) -> bool:
        """Gives a task to a worker, to be written into the leased slot; False if the worker's queue is full now."""

    def receive(self) -> list[Result | Death]:
        """Waits until there is a result or a death. A worker past its time limit is killed, and reported as dead."""

    def open(self, result: Result, lease: Lease | None) -> Reading | BaseException:
        """Returns the batch of a result, on the leased slot, or the error that the task ended with."""

    def discard(self, result: Result) -> None:
        """Frees what a result holds that nobody wants."""

    def close(self) -> None:
        """Ends the workers."""
