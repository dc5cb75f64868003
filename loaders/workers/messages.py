"""What workers and the engine tell each other: readings of tasks, deaths of workers, and the messages of processes.

A message of a process is a few numbers, which never fill its socket. The task and the batch lie in the slot.
"""

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import ExpectedError
from ..work import Work

# To a worker: a task's number, its memory's, its slot's, the slot's size, where the task lies there and its size. The
# descriptor of a memory that differs from the last task's comes along.
MESSAGE = struct.Struct("6q")
# From a worker: the task's number (or READY, or FULL before a sentence), where the batch's pickle lies, its size, the
# size of the notes after it, bytes of tensors, bytes used, whether somebody may still read the slot, and Work.
ANSWER = struct.Struct("7q6d")
READY = -1
FULL = -2
ROOM = 4 + ANSWER.size + (1 << 12)  # bytes of the longest message

# What a worker is reading, if not a single row of a batch.
WHOLE_BATCH = -2
NO_ROW = -1
CLOSED = "another thread closed the loader while this one used it"
NO_WORK = Work()


class WorkerFailure(ExpectedError, RuntimeError):
    """A batch could not be read: workers died or hung while reading it, or threads exceeded their time limit."""


@dataclass(slots=True)
class Reading:
    """What came of a task: its batch, or the error in its place."""

    batch: Any = None
    error: BaseException | None = None
    skipped: list[tuple[Any, str]] = field(default_factory=list)  # (index, reason) of samples that are left out
    retried: list[tuple[Any, str]] = field(default_factory=list)  # (index or a batch's name, reason) of each retry
    collate_seconds: float = 0.0
    place: Any = None  # the place of the task's stream after it, also if reading raised an error
    is_empty: bool = False  # the stream had ended before: there is no batch
    work: Work = NO_WORK
    task: Any = None  # the engine sets it
    # A worker process leaves its batch in a slot:
    pickle_start: int = 0  # where the batch's pickle begins
    pickle_size: int = 0
    tensor_bytes: int = 0
    used: int = 0  # bytes of the slot
    keeps_slot: bool = False  # the worker, or a process that it forked, can still read what it wrote

    @property
    def has_batch(self) -> bool:
        return self.error is None and not self.is_empty

    @property
    def has_notes(self) -> bool:
        """Returns whether there are notes beside the batch."""
        return bool(self.skipped or self.retried) or self.is_empty or self.place is not None


class Answer(NamedTuple):
    """A worker has read the task of this number, or failed to."""

    number: int
    reading: Reading


@dataclass
class WorkerDied:
    """Reports that a worker died, or was killed because it hung. Its unanswered tasks have to be retried."""

    worker: int
    reason: str  # in torch's words
    row: int  # the row that it was reading, or one of the constants above
