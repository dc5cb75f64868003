"""What a pool promises to the dispatcher, and what it reports: results of tasks, and the ends of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loaders.reading import Task
from loaders.slots import Lease

WHOLE = -2  # for the row of a batch that is read as a whole


class WorkerFailure(RuntimeError):
    """Workers, not the dataset's code, are at fault: they died or hung, again and again, reading one batch."""


class PoolClosed(RuntimeError):
    """Another thread has closed the loader meanwhile."""


class WorkerTimeout(WorkerFailure):
    """A thread takes longer for its task than it may, and cannot be replaced."""


class Result(Protocol):
    """What came back for a task."""

    number: int
    needed: int  # bytes of the batch's tensors
    overflowed: bool  # found no room in its slot
    is_pickled: bool  # has tensors that travelled inside a pickle
    busy_seconds: float
    wait_seconds: float

    def open(self, memory: Callable[[], torch.Tensor]) -> Any:
        """The loaders.reading.Reading, over the slot's memory; raises the error that the task ended with."""

    def close(self) -> None:
        """Lets go of what the result holds."""


@dataclass
class Death:
    """A worker that ended, or was ended because it hung; all of its tasks that have no result are lost."""

    worker: int
    reason: str  # in torch's words
    row: int  # of the batch that it was reading; WHOLE, or -1 if it was not reading


class Pool(Protocol):
    """Workers that read tasks; one thread at a time drives it."""

    num_workers: int
    processes: list[Any]  # empty for threads
    copies_when_short: bool  # whether a batch has to be copied out of its slot when slots run short

    def load(self, worker: int) -> int:
        """How many tasks the worker has not answered."""

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None) -> bool:
        """Sends a task, to be written into the leased slot; False where there is no room for it now."""

    def receive(self, timeout: float | None) -> list[Result | Death]:
        """Waits until something has happened, at most `timeout` seconds (None: for ever)."""

    def busy_since(self, worker: int) -> float | None:
        """When, by time.monotonic, the worker began what it is doing; None where it does nothing."""

    def has_moved_on(self, worker: int) -> bool:
        """Whether the worker has gone on to another sample since this was last asked; if so, it began just now."""

    def end(self, worker: int, reason: str) -> Death:
        """Ends a worker that hangs. Raises WorkerTimeout where it cannot be ended."""

    def close(self) -> None:
        """Ends the workers."""
