"""Counts what a loader has done so far; always on, because it costs almost nothing."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from typing import Any

from ..timeline import Work
from .pool import Result

log = logging.getLogger(__name__)

KEPT = 100  # how many skipped samples are listed; all are counted


@dataclass
class Stats:
    """Totals since the start; seconds are summed over workers."""

    batches: int = 0  # delivered, including errors
    bytes: int = 0  # of their tensors
    overflowed_batches: int = 0  # too large for their slot: the first ones, and those larger than all before
    pickled_batches: int = 0  # with tensors that only a pickle can carry
    copied_batches: int = 0  # copied out of their slot because all slots were leased
    read_batches: int = 0  # by workers, including those that nobody wanted any more
    worker_busy_seconds: float = 0.0
    worker_busy_squares: float = 0.0  # the sum of squares, without queueing for a core: the spread of a batch's time
    worker_cpu_seconds: float = 0.0  # the part of being busy in which the worker's thread computed
    worker_queued_seconds: float = 0.0  # the part of being busy in which it was ready to compute and had no core
    worker_collate_seconds: float = 0.0  # the part of being busy that collate_fn took
    worker_wait_seconds: float = 0.0
    wait_seconds: float = 0.0  # of the consumer
    retry_wait_seconds: float = 0.0  # the part of it in which a batch was read again because a worker had died
    queued: int = 0  # further batches that were ready at each delivery, summed
    active_workers: int = 0  # how many get tasks now
    worker_changes: int = 0  # how often num_workers="auto" changed that number
    deaths: int = 0  # of workers, including those killed because they hung
    skipped_samples: int = 0  # left out by on_error="skip"
    skipped: list[tuple[Any, str]] = field(default_factory=list)  # the first of them: (index, what went wrong)

    def count_work(self, work: Work) -> None:
        self.read_batches += 1
        self.worker_busy_seconds += work.seconds
        self.worker_busy_squares += (work.seconds - work.queued_seconds) ** 2
        self.worker_cpu_seconds += work.cpu_seconds
        self.worker_queued_seconds += work.queued_seconds
        self.worker_collate_seconds += work.collate_seconds
        self.worker_wait_seconds += work.wait_seconds

    @property
    def worker_load(self) -> float:
        """The share of a core that a worker has used while it read: less than 1 if it waits, for a disk perhaps."""
        seconds = self.worker_busy_seconds - self.worker_queued_seconds
        return min(1.0, self.worker_cpu_seconds / seconds) if seconds > 0 else 1.0

    def count_delivery(self, result: Result, queued: int, waited: float) -> None:
        self.batches += 1
        self.wait_seconds += waited
        self.bytes += result.needed
        self.queued += queued
        self.pickled_batches += result.is_pickled
        self.overflowed_batches += result.overflowed

    def count_skipped(self, skipped: list[tuple[Any, str]]) -> None:
        for index, reason in skipped:
            log.warning("sample %s could not be read and is left out: %s", index, reason)
        self.skipped_samples += len(skipped)
        self.skipped += skipped[: KEPT - len(self.skipped)]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean_queued": self.queued / max(1, self.batches)}
