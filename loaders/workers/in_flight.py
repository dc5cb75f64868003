"""A task on its way from the dispatcher to a worker and back, and what happens to it when its worker dies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..base import Delivery
from .pool import NEVER_BEGAN, WHOLE_BATCH, Death, Pool, Result, WorkerFailure
from .reader import Reading
from .shared_memory import MachineFull
from .slots import Lease, SlotRing
from .stats import Stats


@dataclass(slots=True)
class InFlight:
    """A task, the worker that reads it, and the slot that it writes to."""

    task: Any  # a Task or a StreamTask
    worker: int
    lease: Lease | None = None
    sent: list[Any] = field(default_factory=list)  # is not empty if the worker has got the task
    is_wanted: bool = True
    result: Result | None = None
    deaths: int = 0  # how many workers in a row died while reading it

    def count_death(self, death: Death, max_restarts: int, skips: bool) -> list[tuple[Any, str]]:
        """Counts the death of the worker that was reading this task, and decides whether the task is retried.

        It is retried `max_restarts` times, the last time sample by sample, so that another death names its sample.
        That sample is then left out (`skips`) and the count begins again, or a WorkerFailure becomes the result. With
        `skips` a task that was never read sample by sample is retried once more, to find the sample.

        Returns the sample that is left out, if any: [(index, reason)].
        """
        self.deaths += 1
        task, next_is_last = self.task, self.deaths >= max_restarts
        self.task = task._replace(singly=task.singly or next_is_last)
        has_begun = death.row != NEVER_BEGAN  # else the next worker would not begin either
        if has_begun and (self.deaths <= max_restarts or (skips and not task.singly and death.row == WHOLE_BATCH)):
            return []
        if death.row >= 0 and skips:
            self.task, self.deaths = self.task._replace(without=task.without | {death.row}), 0
            return [(list(task.indices)[death.row], death.reason)]
        count = "A worker" if self.deaths == 1 else f"{self.deaths} workers in a row"
        if death.row >= 0:
            moment = f"while reading sample {list(task.indices)[death.row]}; on_error='skip' leaves such samples out"
        elif death.row == WHOLE_BATCH:
            moment = f"while reading {task.indices}"
        elif has_begun:
            moment = "before reading a sample, perhaps in worker_init_fn"
        else:
            moment = "before it began: a program whose workers are not forked needs `if __name__ == '__main__':`"
        self.result = Result(-1, error=WorkerFailure(f"{death.reason} {count} died on this batch, {moment}"))
        return []

    def open(self, pool: Pool, ring: SlotRing, stats: Stats, ready: int, waited: float) -> Delivery:
        """Returns the batch of the result, or its error. May be called again, if an exception interrupted it.

        ready: how many further batches have a result; waited: the seconds for which the consumer waited.
        """
        result, lease, number = self.result, self.lease, self.task.number
        assert result is not None
        stats.count_delivery(result, ready, waited)
        if self.deaths or self.task.without:
            stats.retry_wait_seconds += waited
        error = result.error
        if lease is not None and error is None:
            if pool.writes_to_slots and not ring.has_spare():
                # No slot is left for another task: copy the batch out of its slot, instead of waiting for one.
                lease = replace(lease, array=lease.array[: result.needed].copy())
                stats.copied_batches += 1
            else:
                lease.slot.deliver()
        if not isinstance(error, BaseException):
            try:
                opened = pool.open(result, lease)
            except MachineFull as full:
                return Delivery(number, error=full, progress=result.progress)
            if isinstance(opened, Reading):
                stats.count_skipped(opened.skipped)
                return Delivery(number, opened.batch, progress=result.progress)
            error = opened
        return Delivery(number, error=error, progress=result.progress)
