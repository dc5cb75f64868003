"""Between a loader's tasks and its pool: who reads what, in which order results come out, what a worker's end means.

Invariant: every task that was taken up is in one place: with a worker, lost by one and not yet given out again,
answered, or delivered; and at most `depth` that are wanted are undelivered. Tasks that are not wanted any more (a new
epoch, a broken-off one) are answered all the same, and only then are their slots free.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from loaders.pools.results import WHOLE, Death, Pool, PoolClosed, Result, WorkerFailure
from loaders.reading import Task
from loaders.slots import Lease, MachineFull, SlotRing
from loaders.stats import Stats

log = logging.getLogger(__name__)

# Slots beside those of undelivered batches: for what a training loop and a preloader's queue hold at once. Each is
# made when it is first needed; a batch that finds none is delivered as a copy.
LEASES = 8


@dataclass
class _Taken:
    task: Task
    worker: int
    lease: Lease | None
    wanted: bool = True
    result: Result | None = None
    deaths: int = 0  # of workers that were reading it, in a row


class Dispatcher:
    """Keeps `depth` tasks of a stream with the pool's workers, and delivers their batches.

    `round_robin`: task k goes to worker k modulo their number, as torch does; else to the one with the least to do.
    `in_order`: batches are delivered in the order of their tasks; else as they come.
    A task whose worker has ended, or has taken longer than `timeout` seconds (0: for ever), is given out again; after
    `max_restarts` such ends in a row the sample is left out (`skips`), or the batch ends with WorkerFailure.
    """

    def __init__(
        self,
        pool: Pool,
        ring: SlotRing,
        depth: int,
        *,
        round_robin: bool,
        in_order: bool,
        timeout: float,
        max_restarts: int,
        skips: bool,
    ) -> None:
        self.pool, self.ring, self.stats = pool, ring, Stats()
        self._depth, self._round_robin, self._in_order = depth, round_robin, in_order
        self._timeout, self._max_restarts, self._skips = timeout, max_restarts, skips
        self._ids = itertools.count()
        self._turns: Iterator[int] = iter(())
        self._taken: dict[int, _Taken] = {}  # with a worker, lost, or answered and wanted
        self._queue: deque[int] = deque()  # wanted, in the order of their tasks
        self._lost: deque[int] = deque()  # to be given out again
        self._tasks: Iterator[Task] = iter(())
        self._held: tuple[Task, int] | None = None  # a task that its worker's pipe had no room for
        self._failed: Exception | None = None  # what the stream of tasks ended with
        self._closed = False

    @property
    def processes(self) -> list[Any]:
        return self.pool.processes

    def begin(self, tasks: Iterator[Task]) -> None:
        """Takes up a new stream of tasks, and drops what is left of the old one."""
        for number in self._queue:
            self._taken[number].wanted = False
            if self._taken[number].result is not None or number in self._lost:
                self._drop(number)
        self._queue.clear()
        self._lost.clear()
        self._tasks, self._held, self._failed = tasks, None, None
        self._turns = itertools.cycle(range(self.pool.num_workers))
        self._submit()

    def head(self) -> Task | None:
        """The task whose batch `next` would deliver in order; None at the end of the stream."""
        while not self._queue:
            self._submit()
            if self._queue or self._held is None:
                break
            self._receive(self._held[1])  # whose pipe is full of tasks that are not wanted any more
        if self._queue:
            return self._taken[self._queue[0]].task
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error
        return None

    def next(self) -> Any:
        """The next batch; waits for it. Raises its error, and WorkerTimeout when a thread is too slow."""
        began = time.perf_counter()
        self._submit()
        try:
            number = self._wait()
        except LookupError:
            if self._closed:  # by another thread, meanwhile
                raise PoolClosed("the loader was closed") from None
            raise
        self.stats.wait_seconds += time.perf_counter() - began
        self._queue.remove(number)
        taken = self._taken.pop(number)
        try:
            return self._deliver(taken)
        finally:
            with suppress(MachineFull):  # the next call tries again, and says so
                self._submit(sparing=True)

    def close(self) -> None:
        """Ends the workers and lets go of the memory; what was delivered stays valid."""
        self._closed = True
        self.pool.close()
        for number in list(self._taken):
            self._drop(number)
        self._queue.clear()
        self._lost.clear()
        self._tasks, self._held = iter(()), None
        self.ring.close()

    def _submit(self, sparing: bool = False) -> None:
        """Sends as many tasks as may be ahead, lost ones first.

        `sparing`: the last one waits for the next call rather than for a slot to be made, where workers have enough to
        do: by then the consumer has dropped the batch before the one it is given now.
        """
        while self._lost:
            taken = self._taken[self._lost[0]]
            if not self.pool.submit(taken.worker, self._lost[0], taken.task, taken.lease):
                return
            self._lost.popleft()
        while len(self._queue) < self._depth:
            if self._held is None:
                try:
                    task = next(self._tasks, None)
                except Exception as error:  # the sampler's: it comes out after the batches before it
                    self._tasks, self._failed = iter(()), error
                    return
                if task is None:
                    return
                self._held = task, self._choose()
            if sparing and len(self._queue) == self._depth - 1 >= self.pool.num_workers and not self.ring.has_free():
                return
            task, worker = self._held
            lease, number = self.ring.acquire(), next(self._ids)
            if not self.pool.submit(worker, number, task, lease):
                return
            self._held = None
            self._taken[number] = _Taken(task, worker, lease)
            self._queue.append(number)

    def _choose(self) -> int:
        if self._round_robin:
            return next(self._turns)
        return min(range(self.pool.num_workers), key=self.pool.load)

    def _wait(self) -> int:
        while True:
            for number in self._queue:
                if self._taken[number].result is not None:
                    return number
                if self._in_order:
                    break
            self._receive(self._taken[self._queue[0]].worker)

    def _receive(self, worker: int) -> None:
        """Waits until something has happened, as long as `worker` may take for what it is doing."""
        since, remaining = self.pool.busy_since(worker), self._timeout or None
        if remaining is not None and since is not None:
            remaining = since + self._timeout - time.monotonic()
        events = self.pool.receive(remaining)
        if not events and remaining is not None and remaining <= 0 and since == self.pool.busy_since(worker):
            if self._reads_singly(worker) and self.pool.has_moved_on(worker):
                return  # sample by sample it takes longer
            events = [self.pool.end(worker, f"DataLoader timed out after {self._timeout} seconds.")]
        for event in events:
            if isinstance(event, Death):
                self._give_out_again(event)
            else:
                self._note(event)
        if self._lost:
            self._submit()

    def _reads_singly(self, worker: int) -> bool:
        return any(taken.worker == worker and not taken.result and taken.task.singly for taken in self._taken.values())

    def _note(self, result: Result) -> None:
        taken = self._taken[result.number]
        taken.result = result
        self.stats.worker_busy_seconds += result.busy_seconds
        self.stats.worker_wait_seconds += result.wait_seconds
        self.ring.fit(result.needed)
        if not taken.wanted:
            self._drop(result.number)

    def _give_out_again(self, death: Death) -> None:
        """What the worker had not answered; the first of that is charged with its end."""
        lost = [number for number, taken in self._taken.items() if taken.worker == death.worker and not taken.result]
        lost = [number for number in lost if number not in self._lost]
        if lost:
            self._charge(self._taken[lost[0]], death)
        again = [number for number in lost if self._taken[number].wanted and not self._taken[number].result]
        for number in lost:
            if not self._taken[number].wanted:
                self._drop(number)
        self._lost.extend(again)
        self.stats.deaths += 1
        log.warning("%s Another takes its place; batches that are read again: %d", death.reason, len(again))

    def _charge(self, taken: _Taken, death: Death) -> None:
        """Counts a worker's end; after too many the sample is left out, or the task has a failure for its result."""
        taken.deaths += 1
        task, is_last = taken.task, taken.deaths >= self._max_restarts
        taken.task = replace(task, singly=task.singly or is_last)  # to find the sample
        if taken.deaths <= self._max_restarts or (self._skips and not task.singly and death.row == WHOLE):
            return
        if death.row >= 0:
            sample = list(task.indices)[death.row]
            where = f"reading sample {sample}"
        elif death.row == WHOLE:
            where = f"reading {task.indices}"
        else:
            where = "before they read a sample: in worker_init_fn, perhaps"
        if self._skips and death.row >= 0:
            taken.task, taken.deaths = replace(taken.task, without=task.without | {death.row}), 0
            self.stats.count_skipped([(sample, death.reason)])
        else:
            count = "a worker has" if taken.deaths == 1 else f"{taken.deaths} workers in a row have"
            taken.result = _GivenUp(WorkerFailure(f"{death.reason} Over one batch {count} ended, {where}"))

    def _drop(self, number: int) -> None:
        taken = self._taken.pop(number)
        if taken.result is not None:
            taken.result.close()

    def _deliver(self, taken: _Taken) -> Any:
        result = taken.result
        self.stats.batches += 1
        self.stats.bytes += result.needed
        self.stats.queued += sum(1 for number in self._queue if self._taken[number].result is not None)

        def memory() -> torch.Tensor:
            if not self.pool.copies_when_short or self.ring.has_spare():
                return taken.lease.memory
            self.stats.copied_batches += 1
            return taken.lease.memory[: result.needed].clone()

        try:
            reading = result.open(memory)
        finally:
            result.close()
        self.stats.pickled_batches += result.is_pickled
        self.stats.overflowed_batches += result.overflowed
        self.stats.count_skipped(reading.skipped)
        return reading.batch


class _GivenUp:
    """The result of a task that workers keep ending at."""

    needed, overflowed, is_pickled = 0, False, False

    def __init__(self, error: WorkerFailure) -> None:
        self._error = error

    def open(self, memory: Callable[[], torch.Tensor]) -> Any:
        raise self._error

    def close(self) -> None:
        pass
