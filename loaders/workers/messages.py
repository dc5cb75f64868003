"""What workers and the engine tell each other: readings of tasks, deaths of workers, and the messages of processes.

A message of a process is a few numbers, which never fill its socket. The task and the batch lie in the slot.
A task's ticket is the engine's own number for it: unlike the number of its batch, no other task of the engine has it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import ExpectedError
from ..work import Work

TASK_FORMAT = struct.Struct("5q")  # a TaskMessage
ANSWER_FORMAT = struct.Struct("7q?")  # an AnswerMessage
WORK_FORMAT = struct.Struct("6d")  # the Work behind it
READY = -1
FULL = -2
ROOM = ANSWER_FORMAT.size + (1 << 12)  # bytes of the longest message; more of a sentence would be cut

# What a worker is reading, if not a single row of a batch.
WHOLE_BATCH = -2
NO_ROW = -1
CLOSED = "another thread closed the loader while this one used it"
NO_WORK = Work()

Note = tuple[Any, str]  # (index of a sample or name of a batch, its error)


class WorkerFailure(ExpectedError, RuntimeError):
    """A batch could not be read: workers died or hung while reading it, or threads exceeded their time limit."""


@dataclass(slots=True)
class Reading:
    """What came of a task: its batch, or the error in its place."""

    batch: Any = None
    error: BaseException | None = None
    skipped: list[Note] = field(default_factory=list)  # samples that raised
    retried: list[Note] = field(default_factory=list)  # retries, of samples or batches
    collate_seconds: float = 0.0
    place: Any = None  # the place of the task's stream after it, also if reading raised an error
    is_empty: bool = False  # the stream had ended before: there is no batch
    work: Work = NO_WORK
    task: Any = None  # the engine sets it
    ticket: int = -1
    is_transformed: bool = False  # the batch has gone through the Preloader's transform
    message: Any = None  # an AnswerMessage, from a worker process: its batch lies in a slot

    @property
    def has_batch(self) -> bool:
        return self.error is None and not self.is_empty

    @property
    def has_notes(self) -> bool:
        """Returns whether there are notes beside the batch."""
        return bool(self.skipped or self.retried) or self.is_empty or self.place is not None


class TaskMessage(NamedTuple):
    """To a worker process. The descriptor of the memory comes along, if it is not the last task's memory."""

    ticket: int
    memory: int  # its number
    slot: int  # its number in the memory
    slot_size: int  # bytes
    task_size: int  # bytes of the pickled task, behind the slot's header


class AnswerMessage(NamedTuple):
    """From a worker process: where the batch lies in the slot, and notes on it, if there are any; its Work follows."""

    ticket: int  # or READY, and nothing follows; or FULL, and a sentence follows
    pickle_start: int = 0  # where the pickled batch begins in the slot
    pickle_size: int = 0  # bytes
    notes_start: int = 0
    notes_size: int = 0  # bytes; 0: no notes
    tensor_bytes: int = 0
    used: int = 0  # bytes of the slot
    is_spoilt: bool = False  # the worker, or a process that it forked, can still read what it wrote


@dataclass
class WorkerDied:
    """Reports that a worker died, or was killed because it hung. Its unanswered tasks have to be retried."""

    worker: int
    reason: str  # in torch's words
    row: int  # the row that it was reading, or one of the constants above


def where(row: int, task: Any) -> str:
    """Returns what a worker is doing, or was when it died, for an error."""
    if row == NO_ROW:
        return "before reading a sample, perhaps in worker_init_fn"
    if row == WHOLE_BATCH and has_rows(task):
        return f"while reading one of {task.indices}, or collating them"
    return f"while reading sample {sample_at(row, task)}"


def sample_at(row: int, task: Any) -> Any:
    return task.indices[row] if has_rows(task) else task.indices


def has_rows(task: Any) -> bool:
    """Whether the task is a batch of several samples."""
    return isinstance(task.indices, (Sequence, np.ndarray)) and not isinstance(task.indices, str)
