"""Counts what a loader's workers and its consumer do. It is always on, because it costs almost nothing."""

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
    """Totals since the workers were started; the workers' seconds are summed over all of them."""

    batches: int = 0  # delivered, errors included
    bytes: int = 0  # of the delivered batches' tensors
    overflowed_batches: int = 0  # too large for their slot: the first ones, and those larger than all before
    pickled_batches: int = 0  # with tensors that had to be pickled
    copied_batches: int = 0  # copied out of their slot because all slots were leased
    read_batches: int = 0  # read by workers, including those of an epoch that the consumer left early
    worker_busy_seconds: float = 0.0  # in which workers read batches
    worker_cpu_seconds: float = 0.0  # the part of the busy seconds in which the worker's thread computed
    worker_queued_seconds: float = 0.0  # the part of the busy seconds in which it waited for a core
    worker_collate_seconds: float = 0.0  # the part of the busy seconds in which it collated
    worker_wait_seconds: float = 0.0  # in which workers waited for tasks
    wait_seconds: float = 0.0  # in which the consumer waited for batches
    retry_wait_seconds: float = 0.0  # the part of wait_seconds for batches that were retried because a worker had died
    queued: int = 0  # further batches that were ready at each delivery, summed
    active_workers: int = 0  # how many workers get tasks now
    worker_changes: int = 0  # how often num_workers="auto" changed that number
    deaths: int = 0  # of workers, including those that were killed because they hung
    skipped_samples: int = 0  # left out by on_error="skip"
    skipped: list[tuple[Any, str]] = field(default_factory=list)  # the first KEPT of them: (index, what went wrong)

    def count_work(self, work: Work) -> None:
        self.read_batches += 1
        self.worker_busy_seconds += work.seconds
        self.worker_cpu_seconds += work.cpu_seconds
        self.worker_queued_seconds += work.queued_seconds
        self.worker_collate_seconds += work.collate_seconds
        self.worker_wait_seconds += work.wait_seconds

    @property
    def worker_load(self) -> float:
        """The share of a core that a worker uses while it reads: less than 1 if it waits, for a disk for example."""
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
        """Returns the totals, and `mean_queued`: how many batches were ready at a delivery, on average."""
        return {**asdict(self), "mean_queued": self.queued / max(1, self.batches)}
