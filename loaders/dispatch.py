"""Which worker reads what, and in which order results come out: the engine between a loader's tasks and its pool.

Invariant: every task that was taken up is in one place: with a worker, among the answers, or delivered; and at most
`depth` are undelivered. Tasks that are not wanted any more (a new epoch, a broken-off one) are answered all the
same, and only then are their slots free.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from loaders.pools.process import ProcessPool, Result, WorkerTimeout
from loaders.reading import Task, load
from loaders.slots import Slot, SlotRing

# Slots beside those of undelivered batches: for what a training loop and a preloader's queue hold at once. Each is
# made when it is first needed; a batch that finds none is delivered as a copy.
LEASES = 8


@dataclass
class Stats:
    """Totals since the start; seconds are summed over workers."""

    batches: int = 0
    bytes: int = 0
    overflowed_batches: int = 0  # that found no room in a slot: the first ones, and any larger than those before
    pickled_batches: int = 0  # with tensors that only a pickle can carry
    copied_batches: int = 0  # because all slots were leased
    worker_busy_seconds: float = 0.0
    worker_wait_seconds: float = 0.0
    wait_seconds: float = 0.0  # of the consumer
    queued: int = 0  # answers waiting to be delivered, summed over deliveries


@dataclass
class _Taken:
    task: Task
    worker: int
    slot: Slot | None
    wanted: bool = True
    result: Result | None = None


class Dispatcher:
    """Keeps `depth` tasks of a stream with the pool's workers, and delivers their batches.

    `round_robin`: task k goes to worker k modulo their number, as torch does; else to the one with the least to do.
    `in_order`: batches are delivered in the order of their tasks; else as they come.
    """

    def __init__(
        self, pool: ProcessPool, ring: SlotRing, depth: int, round_robin: bool, in_order: bool, timeout: float
    ) -> None:
        self.pool, self.ring, self.stats = pool, ring, Stats()
        self._depth, self._round_robin, self._in_order, self._timeout = depth, round_robin, in_order, timeout
        self._ids = itertools.count()
        self._turns = itertools.cycle(range(len(pool.processes)))
        self._taken: dict[int, _Taken] = {}  # with a worker, or answered and wanted
        self._queue: deque[int] = deque()  # wanted, in the order of their tasks
        self._tasks: Iterator[Task] = iter(())
        self._held: tuple[Task, int] | None = None  # a task that its worker's pipe had no room for
        self._began = [0.0] * len(pool.processes)

    @property
    def processes(self) -> list[Any]:
        return self.pool.processes

    def begin(self, tasks: Iterator[Task]) -> None:
        """Takes up a new stream of tasks, and drops what is left of the old one."""
        for number in self._queue:
            taken = self._taken[number]
            taken.wanted = False
            if taken.result is not None:
                self._drop(number)
        self._queue.clear()
        self._tasks, self._held = tasks, None
        self._turns = itertools.cycle(range(len(self.pool.processes)))
        self._submit()

    def head(self) -> Task | None:
        """The task whose batch `next` would deliver in order; None at the end of the stream."""
        while not self._queue:
            self._submit()
            if self._queue or self._held is None:
                break
            self._receive(self._held[1])  # whose pipe is full of tasks that are not wanted any more
        return self._taken[self._queue[0]].task if self._queue else None

    def next(self) -> Any:
        """The next batch; waits for it. Raises its error, and RuntimeError when a worker dies or is too slow."""
        began = time.perf_counter()
        number = self._wait()
        self.stats.wait_seconds += time.perf_counter() - began
        self._queue.remove(number)
        taken = self._taken.pop(number)
        try:
            return self._deliver(taken)
        finally:
            self._submit()

    def close(self) -> None:
        """Ends the workers and lets go of the memory; what was delivered stays valid."""
        self.pool.close()
        for taken in self._taken.values():
            if taken.result is not None:
                taken.result.close()
            if taken.slot is not None:
                self.ring.release(taken.slot)
        self._taken.clear()
        self._queue.clear()
        self._tasks, self._held = iter(()), None
        self.ring.close()

    def _submit(self) -> None:
        while len(self._queue) < self._depth:
            if self._held is None:
                task = next(self._tasks, None)
                if task is None:
                    return
                self._held = task, self._choose()
            task, worker = self._held
            slot, number = self.ring.acquire(), next(self._ids)
            if not self.pool.submit(worker, number, task, slot):
                if slot is not None:
                    self.ring.release(slot)
                return
            self._held = None
            if self.pool.load(worker) == 1:
                self._began[worker] = time.monotonic()
            self._taken[number] = _Taken(task, worker, slot)
            self._queue.append(number)

    def _choose(self) -> int:
        if self._round_robin:
            return next(self._turns)
        return min(range(len(self._began)), key=self.pool.load)

    def _wait(self) -> int:
        while True:
            if self._in_order:
                if self._taken[self._queue[0]].result is not None:
                    return self._queue[0]
            else:
                for number in self._queue:
                    if self._taken[number].result is not None:
                        return number
            self._receive(self._taken[self._queue[0]].worker)

    def _receive(self, worker: int) -> None:
        """Waits for answers, as long as `worker` may take for what it is doing."""
        remaining = self._began[worker] + self._timeout - time.monotonic() if self._timeout else None
        results = self.pool.receive(remaining)
        if not results and remaining is not None and remaining <= 0:
            self._began[worker] = time.monotonic()  # who asks again waits again
            raise WorkerTimeout(f"DataLoader timed out after {self._timeout} seconds")
        for result in results:
            taken = self._taken[result.number]
            taken.result = result
            self._began[taken.worker] = time.monotonic()
            self.stats.worker_busy_seconds += result.busy_seconds
            self.stats.worker_wait_seconds += result.wait_seconds
            self.ring.fit(result.needed)
            if not taken.wanted:
                self._drop(result.number)

    def _drop(self, number: int) -> None:
        taken = self._taken.pop(number)
        taken.result.close()
        if taken.slot is not None:
            self.ring.release(taken.slot)

    def _deliver(self, taken: _Taken) -> Any:
        result, slot = taken.result, taken.slot
        self.stats.batches += 1
        self.stats.bytes += result.needed
        self.stats.queued += sum(1 for number in self._queue if self._taken[number].result is not None)
        if result.is_error:
            if slot is not None:
                self.ring.release(slot)
            wrapper: ExceptionWrapper = pickle.loads(result.pickled)
            wrapper.reraise()
        self.stats.pickled_batches += result.is_pickled
        self.stats.overflowed_batches += result.has_overflow
        leased = False

        def memory() -> torch.Tensor:
            nonlocal leased
            if self.ring.has_spare():
                leased = True
                return self.ring.lease(slot)
            self.stats.copied_batches += 1
            return torch.from_numpy(slot.array()[: result.needed].copy())

        try:
            return load(result.pickled, memory, result.overflow_fd)
        finally:
            result.close()
            if slot is not None and not leased:
                self.ring.release(slot)
