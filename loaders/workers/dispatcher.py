"""Gives tasks to a pool's workers, puts their batches back in order, and retries the tasks of a worker that died.

Invariant: every task in flight waits to be submitted, is with a worker, or has a result. At most `depth` wanted tasks
are in flight. If a task is no longer wanted, because the user left its epoch early, its worker still reads it; its
slot becomes free only then.

A signal handler may raise an exception wherever a function begins or a call returns, and the next call goes on where
that one was interrupted. So what comes from outside (a task, a message) is fetched and stored by one call, such as
`deque.extend(map(socket.recvmsg, ...))`, within which no handler runs; and each step after that may be done twice.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from ..background import check_owner
from ..base import Delivery
from ..preload.transfer import pinned
from ..timeline import Timeline
from .autotune import FixedNumber, Tuner
from .in_flight import InFlight
from .pool import Death, Pool, Result
from .shared_memory import MachineFull
from .slots import SlotRing
from .stats import Stats
from .tasks import SamplerError, Task

log = logging.getLogger(__name__)


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
    ) -> None:
        self.stats = Stats()
        self._timeline: Timeline | None = None
        self._pins = False
        self._pool, self._ring, self._tuner = pool, ring, tuner or FixedNumber(pool.num_workers)
        # Without workers, a forked child may go on with the loader.
        self._owner = os.getpid() if depth(self._tuner.workers) else None
        self._depth, self._round_robin, self._in_order = depth, round_robin, in_order
        self._max_restarts, self._skips = max_restarts, skips
        self._tasks: Iterator[tuple[int, Task]] = iter(())  # numbered
        self._drawn: deque[tuple[int, Task]] = deque()  # the newest of them, if it is not in flight yet
        self._first = self._next = 0  # numbers: of the first task since `begin`, and of the next one
        self._in_flight: dict[int, InFlight] = {}  # by number, in the order of the tasks
        self._newest: Delivery | None = None
        self._newest_number = -1  # of the task of the newest delivery
        self._tasks_error: Delivery | None = None  # a sampler's error, delivered after the batches before it
        self._has_delivered = False  # since `begin`
        self._has_unsent = False  # a task has to be retried, or its worker had no room for it

    @property
    def processes(self) -> list[Any]:
        return [process for process in self._pool.processes if process is not None]

    def use(self, timeline: Timeline | None, pins: bool) -> None:
        """Records the workers' work in the timeline from now on, and copies batches into pinned memory (`pins`)."""
        self._timeline, self._pins = timeline, pins

    def begin(self, tasks: Iterator[Any]) -> None:
        """Drops the tasks in flight, and continues with new ones."""
        self._drop()
        self._first, self._has_delivered = self._next, False
        self._tasks = enumerate(tasks, self._next)
        self._pool.begin()
        self._submit()

    def _drop(self) -> None:
        """Drops the tasks in flight. Those that a worker has got keep their slots until they are answered."""
        self.check_process()
        self._receive()
        if self._round_robin and self._has_unsent:  # else the workers' random numbers would not be those of torch's
            self._submit()
        for number, flight in list(self._in_flight.items()):
            flight.is_wanted = False
            if flight.result is not None or not flight.sent:
                del self._in_flight[number]
        self._newest = self._tasks_error = None
        self._drawn.clear()

    def continues_with(self, epoch: int, number: int) -> bool:
        """Begins the epoch at batch `number` if that is the next one in flight (loaded ahead); else returns False."""
        self.check_process()
        self._receive()
        self._forget_newest()
        flight = self._first_in_flight()
        if flight is None or (flight.task.epoch, flight.task.number) != (epoch, number):
            return False
        self._newest, self._has_delivered = None, False
        return True

    def next(self, epoch: int | None = None) -> Delivery | None:
        """Waits for the next batch, and returns it or its error, the same again until it is taken.

        None: the epoch has no batch left. Raises EngineError or MachineFull for errors of no batch.
        """
        self.check_process()
        self._forget_newest()
        if self._newest is not None and not self._newest.is_taken:
            return self._newest
        self._newest = None
        self._receive()
        began = time.perf_counter()
        first = self._first_in_flight()
        if first is None and self._tasks_error is not None and not self._tasks_error.is_taken:
            return self._tasks_error
        if first is None or first.task.epoch != epoch:
            return None
        if (found := self._wait()) is None:
            return None
        (number, flight), ended = found, time.perf_counter()
        others = [other.result is not None for other in self._in_flight.values() if other.is_wanted]
        ready, in_flight = sum(others) - 1, len(others) - 1
        delivery = flight.open(self._pool, self._ring, self.stats, ready, ended - began)
        if self._pins and delivery.error is None:
            delivery.batch = pinned(delivery.batch)
        self._newest_number, self._newest = number, delivery
        del first, flight, found  # else they would hold the slot of a batch that lies elsewhere
        self._forget_newest()
        is_first, self._has_delivered = not self._has_delivered, True
        self._tuner.delivered(ended, ended - began, ready, in_flight, is_first, self.stats.worker_load)
        self.stats.active_workers, self.stats.worker_changes = self._tuner.workers, self._tuner.changes
        with suppress(MachineFull):  # the next call tries again, and raises it
            self._submit(sparing=True)
        return delivery

    def close(self) -> None:
        """Ends the workers and frees the memory; delivered batches stay valid."""
        self._pool.close()
        self._in_flight.clear()
        self._drawn.clear()
        self._tasks = iter(())
        self._newest = None
        self._ring.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # `sys` may be gone by then
        if not is_finalizing() and hasattr(self, "_has_unsent"):  # else stop_at_exit has ended the workers
            self.close()

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child of the process that the workers belong to."""
        if self._owner is not None:
            check_owner(self._owner, "workers")

    def _forget_newest(self) -> None:
        """Drops the task whose batch is the newest delivery."""
        if self._newest is not None:
            self._in_flight.pop(self._newest_number, None)

    def _first_in_flight(self) -> InFlight | None:
        if self._has_unsent or self._first_wanted() is None:
            self._submit(least=1)
        return self._first_wanted()

    def _first_wanted(self) -> InFlight | None:
        return next((flight for flight in self._in_flight.values() if flight.is_wanted), None)

    def _submit(self, least: int = 0, sparing: bool = False) -> None:
        """Submits tasks, retries first, until `depth` of them are in flight, or `least` if that is more.

        `sparing`: leaves the last task for the next call if no slot is free and the workers have enough to do. By then
        the consumer has probably dropped a batch, so that its slot can be used and no other has to be made.
        """
        active = self._tuner.workers
        depth = max(self._depth(active), least)
        to_send: list[tuple[int, InFlight]] = []
        if self._has_unsent:
            to_send = [item for item in self._in_flight.items() if not item[1].sent and item[1].result is None]
        self._has_unsent = True  # until all are sent
        wanted = sum([flight.is_wanted for flight in self._in_flight.values()])
        while wanted < depth and (taken := self._take()) is not None:
            to_send.append(taken)
            wanted += 1
        for number, flight in to_send:
            if flight.lease is None:
                is_last = number == self._next - 1
                if sparing and is_last and wanted == depth > active and not self._ring.has_free():
                    return
                flight.lease = self._ring.acquire()
            if not self._send(number, flight):
                return
        self._has_unsent = False

    def _send(self, number: int, flight: InFlight) -> bool:
        return self._pool.submit(flight.worker, number, flight.task, flight.lease, flight.sent)

    def _take(self) -> tuple[int, InFlight] | None:
        """Puts the next task in flight, and chooses its worker; returns it with its number, None if none is left."""
        if self._drawn and self._drawn[0][0] < self._next:  # an interrupted call has put it in flight
            self._drawn.clear()
        if not self._drawn:
            try:
                self._drawn.extend(islice(self._tasks, 1))
            except SamplerError as error:
                self._tasks_error, self._tasks = Delivery(None, error=error.__cause__), iter(())
            if not self._drawn:
                return None
        number, task = self._drawn[0]
        flight = InFlight(task, self._choose_worker(number, task))
        self._in_flight[number], self._next = flight, number + 1
        self._drawn.clear()
        return number, flight

    def _choose_worker(self, number: int, task: Any) -> int:
        workers = range(self._tuner.workers)
        if self._round_robin:
            return (number - self._first) % self._pool.num_workers
        if len(workers) == 1:
            return 0
        loads, new = [0] * self._pool.num_workers, self._tuner.new_workers
        for other in self._in_flight.values():
            loads[other.worker] += other.result is None
        return min(workers, key=lambda worker: (loads[worker], worker not in new))

    def _wait(self) -> tuple[int, InFlight] | None:
        """Waits for the result to be delivered next, and returns its task with its number; None if no task is left."""
        while self._first_wanted() or self._first_in_flight():
            for number, flight in self._in_flight.items():
                if flight.is_wanted and flight.result is not None:
                    return number, flight
                if flight.is_wanted and self._in_order:
                    break
            if not self._pool.events:
                self._pool.wait()
            self._receive()
            if self._has_unsent:
                self._submit(sparing=True)
        return None

    def _receive(self) -> None:
        """Handles the events that have come; those that an interrupted call left are not about tasks sent now."""
        events = self._pool.events
        while events:
            event = events[0]
            if isinstance(event, Death):
                self._retry(event)
            else:
                self._note(event)
            events.popleft()

    def _note(self, result: Result) -> None:
        flight = self._in_flight.get(result.number)
        if flight is None or flight.result is not None:
            return
        if result.holds_slot and flight.lease is not None:
            flight.lease.slot.has_readers = True
        flight.result = result
        self._tuner.new_workers.discard(flight.worker)
        self.stats.count_work(result.work)
        if self._timeline is not None:
            self._timeline.add_work(f"worker {flight.worker}", result.work, flight.task.epoch, flight.task.number)
        self._ring.fit(result.needed)
        if not flight.is_wanted:
            del self._in_flight[result.number]

    def _retry(self, death: Death) -> None:
        """Queues a dead worker's tasks to be retried. The death counts against the first, which it was reading."""
        theirs = [item for item in self._in_flight.items() if item[1].worker == death.worker]
        lost = {number: flight for number, flight in theirs if flight.sent and flight.result is None}
        self._has_unsent = True
        first = next(iter(lost.values()), None)
        for number, flight in lost.items():
            flight.sent.clear()
            if flight is first:
                self.stats.count_skipped(flight.count_death(death, self._max_restarts, self._skips))
            if not flight.is_wanted:
                del self._in_flight[number]
        to_retry = sum(flight.is_wanted and flight.result is None for flight in lost.values())
        self.stats.deaths += 1
        log.warning("%s%s", death.reason, f" Restarting it; batches to retry: {to_retry}" if to_retry else "")
