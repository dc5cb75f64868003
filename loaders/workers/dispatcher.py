"""Gives tasks to a pool's workers, puts their batches back in order, and retries the tasks of a worker that died.

Invariant: every task in flight waits to be submitted, is with a worker, or has a result. At most `depth` wanted tasks
are in flight. If a task is no longer wanted, because the user left its epoch early, its worker still reads it; its
slot becomes free only then.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from ..background import check_owner
from ..base import INTERRUPTED, Delivery
from ..timeline import Timeline
from .autotune import FixedNumber, Tuner
from .in_flight import InFlight
from .pool import Death, EngineError, Pool, Result
from .reader import Reading
from .shared_memory import MachineFull
from .slots import Lease, SlotRing
from .stats import Stats
from .tasks import SamplerError, Task

log = logging.getLogger(__name__)
T = TypeVar("T")

# Slots in addition to those of tasks in flight: for batches that the training loop and a preloader's queue hold. If
# these hold more batches than that, the next ones are delivered as copies.
SPARE_SLOTS = 8


class Dispatcher:
    """Keeps tasks in flight, and delivers their batches.

    depth: given the number of workers that get tasks, returns how many tasks to keep in flight. 0: a task is submitted
        when the consumer asks for its batch.
    round_robin: task k goes to worker k modulo their number, as in torch; else to the worker with the fewest tasks.
    in_order: batches are delivered in the order of their tasks; else as soon as they are ready.
    max_restarts: how often in a row a task is retried after its worker died. After that the sample that the worker was
        reading is left out (`skips`), or a WorkerFailure is delivered instead of the batch.
    tuner: chooses how many of the pool's workers get tasks; None: all of them.
    """

    def __init__(
        self,
        pool: Pool,
        ring: SlotRing,
        depth: Callable[[int], int],
        *,
        round_robin: bool,
        in_order: bool,
        max_restarts: int,
        skips: bool,
        tuner: Tuner | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.stats = Stats()
        self.timeline = timeline
        self.is_interrupted = False  # the record of tasks in flight may be wrong: this dispatcher has to be closed
        self.deliveries = 0  # since `begin`; the consumer counts too, and so notices a delivery that it did not get
        self._pool, self._ring, self._tuner = pool, ring, tuner or FixedNumber(pool.num_workers)
        # Without workers, a forked child may go on with the loader.
        self._owner = os.getpid() if depth(self._tuner.workers) else None
        self._depth, self._round_robin, self._in_order = depth, round_robin, in_order
        self._max_restarts, self._skips = max_restarts, skips
        self._numbers = itertools.count()
        self._turns: Iterator[int] = iter(())
        self._loads = [0] * pool.num_workers  # tasks of each worker
        self._in_flight: dict[int, InFlight] = {}
        self._queue: deque[int] = deque()  # numbers of the wanted ones, in the order of their tasks
        self._waiting: deque[int] = deque()  # of those to submit: retries, or a task that its worker had no room for
        self._tasks: Iterator[Task] = iter(())
        self._tasks_error: BaseException | None = None  # a sampler's error, delivered after the batches before it

    @property
    def processes(self) -> list[Any]:
        return [process for process in self._pool.processes if process is not None]

    def begin(self, tasks: Iterator[Task]) -> None:
        """Drops the tasks in flight, and continues with new ones."""
        self._guarded(self._begin, tasks)

    def continues_with(self, epoch: int, number: int) -> bool:
        """Begins the epoch at batch `number` if that is the next one in flight (loaded ahead); else returns False."""
        task = self._guarded(self._first_task)
        if task is None or (task.epoch, task.number) != (epoch, number):
            return False
        self.deliveries = 0
        return True

    def next(self, epoch: int | None = None) -> Delivery | None:
        """Waits for the next batch, and returns it or its error; None if the epoch has no batch left.

        Raises EngineError or MachineFull if the error belongs to no batch, and RuntimeError after an interruption.
        """
        return self._guarded(self._next, epoch)

    def close(self) -> None:
        """Ends the workers and frees the memory; delivered batches stay valid."""
        self._pool.close()
        for number in list(self._in_flight):
            self._drop(number)
        self._queue.clear()
        self._waiting.clear()
        self._tasks = iter(())
        self._ring.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # `sys` may be gone by then
        if not is_finalizing():  # else stop_at_exit has ended the workers
            self.close()

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child of the process that the workers belong to."""
        if self._owner is not None:
            check_owner(self._owner, "workers")

    def _guarded(self, action: Callable[..., T], *arguments: Any) -> T:
        """Runs the action. If an exception interrupts it, is_interrupted stays set: the record may be wrong."""
        self.check_process()
        if self.is_interrupted:
            raise RuntimeError(INTERRUPTED)
        self.is_interrupted = True
        try:
            outcome = action(*arguments)
        except (EngineError, MachineFull):
            self.is_interrupted = False
            raise
        self.is_interrupted = False
        return outcome

    def _begin(self, tasks: Iterator[Task]) -> None:
        for number in self._queue:
            flight = self._in_flight[number]
            flight.is_wanted = False
            if flight.result is not None or number in self._waiting:
                self._drop(number)
        self._queue.clear()
        self._waiting.clear()
        self._tasks, self._tasks_error = tasks, None
        self.deliveries = 0
        self._turns = itertools.cycle(range(self._pool.num_workers))
        self._pool.begin()
        self._submit()

    def _submit(self, least: int = 0, sparing: bool = False) -> None:
        """Submits tasks, retries first, until `depth` of them are in flight, or `least` if that is more.

        `sparing`: leaves the last task for the next call if no slot is free and the workers have enough to do. By then
        the consumer has probably dropped a batch, so that its slot can be used and no other has to be made.
        """
        active = self._tuner.workers
        depth = max(self._depth(active), least)
        while self._waiting or (len(self._queue) < depth and self._take()):
            number = self._waiting[0]
            flight = self._in_flight[number]
            if flight.lease is None:
                if sparing and len(self._queue) == depth > active and not self._ring.has_free():
                    return
                flight.lease = self._ring.acquire()
            if not self._pool.submit(flight.worker, number, flight.task, flight.lease):
                return
            self._waiting.popleft()
            self._loads[flight.worker] += 1

    def _take(self) -> bool:
        """Takes a task to be submitted, and chooses its worker; False if there is none left."""
        try:
            task = next(self._tasks, None)
        except SamplerError as error:
            self._tasks, self._tasks_error = iter(()), error.__cause__
            return False
        if task is None:
            return False
        number = next(self._numbers)
        loads, tuner = self._loads, self._tuner
        if self._round_robin:
            worker = next(self._turns)
        else:
            worker = min(range(tuner.workers), key=lambda worker: (loads[worker], worker not in tuner.new_workers))
        self._in_flight[number] = InFlight(task, worker)
        self._queue.append(number)
        self._waiting.append(number)
        return True

    def _first_task(self) -> Task | None:
        self._submit(least=1)
        return self._in_flight[self._queue[0]].task if self._queue else None

    def _next(self, epoch: int | None) -> Delivery | None:
        began = time.perf_counter()
        task = self._first_task()
        if task is None and self._tasks_error is not None:
            error, self._tasks_error = self._tasks_error, None
            self.deliveries += 1
            return Delivery(None, error=error)
        if task is None or task.epoch != epoch:
            return None
        number = self._wait()
        ended = time.perf_counter()
        self._queue.remove(number)
        ready = sum(1 for other in self._queue if self._in_flight[other].result is not None)
        delivery = self._open(self._in_flight.pop(number), ready, ended - began)
        self.deliveries += 1
        is_first, load = self.deliveries == 1, self.stats.worker_load
        self._tuner.delivered(ended, ended - began, ready, len(self._queue), is_first, load)
        self.stats.active_workers, self.stats.worker_changes = self._tuner.workers, self._tuner.changes
        with suppress(MachineFull):  # the next call tries again, and raises it
            self._submit(sparing=True)
        return delivery

    def _wait(self) -> int:
        """Waits for the result to be delivered next, and returns the task's number."""
        while True:
            for number in self._queue:
                if self._in_flight[number].result is not None:
                    return number
                if self._in_order:
                    break
            self._receive()

    def _receive(self) -> None:
        for event in self._pool.receive():
            if isinstance(event, Death):
                self._retry(event)
            else:
                self._note(event)
        if self._waiting:
            self._submit()

    def _note(self, result: Result) -> None:
        flight = self._in_flight[result.number]
        flight.result = result
        self._loads[flight.worker] -= 1
        self._tuner.new_workers.discard(flight.worker)
        self.stats.count_work(result.work)
        if self.timeline is not None:
            self.timeline.add_work(f"worker {flight.worker}", result.work, flight.task.epoch, flight.task.number)
        self._ring.fit(result.needed)
        if not flight.is_wanted:
            self._drop(result.number)

    def _retry(self, death: Death) -> None:
        """Queues a dead worker's tasks to be retried. The death counts against the first, which it was reading."""
        numbers = [
            number
            for number, flight in self._in_flight.items()
            if flight.worker == death.worker and flight.result is None and number not in self._waiting
        ]
        self._loads[death.worker] = 0
        if numbers:
            first = self._in_flight[numbers[0]]
            self.stats.count_skipped(first.count_death(death, self._max_restarts, self._skips))
        to_retry = 0
        for number in reversed(numbers):
            flight = self._in_flight[number]
            if not flight.is_wanted:
                self._drop(number)
            elif flight.result is None:
                self._waiting.appendleft(number)
                to_retry += 1
        self.stats.deaths += 1
        log.warning("%s Restarting the worker; batches to retry: %d", death.reason, to_retry)

    def _drop(self, number: int) -> None:
        flight = self._in_flight.pop(number)
        if flight.result is not None:
            self._pool.discard(flight.result)

    def _open(self, flight: InFlight, ready: int, waited: float) -> Delivery:
        result, lease, number = flight.result, flight.lease, flight.task.number
        assert result is not None
        self.stats.count_delivery(result, ready, waited)
        if flight.deaths or flight.task.without:
            self.stats.retry_wait_seconds += waited
        error = result.error
        if lease is not None and error is None and self._pool.writes_to_slots and not self._ring.has_spare():
            # No slot is left for another task: copy the batch out of its slot, instead of waiting for one.
            lease = Lease(lease.array[: result.needed].copy(), lease.place)
            self.stats.copied_batches += 1
        if not isinstance(error, BaseException):
            try:
                opened = self._pool.open(result, lease)
            except MachineFull as full:
                return Delivery(number, error=full)
            if isinstance(opened, Reading):
                self.stats.count_skipped(opened.skipped)
                return Delivery(number, opened.batch)
            error = opened
        if isinstance(error, StopIteration):  # raised by next(), it would silently end the epoch
            cause, error = error, RuntimeError("a worker raised StopIteration")
            error.__cause__ = cause
        return Delivery(number, error=error)
