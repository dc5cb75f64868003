"""Worker threads: nothing is sent or mapped, a batch is written into memory that the consumer then has.

They never touch the global generators, which all threads share. One that hangs cannot be ended, and is left behind.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from loaders.pools.inline import warn_of_unseeded_reading
from loaders.pools.results import Death, PoolClosed, WorkerTimeout
from loaders.reading import Reader, Reading, Room, Task
from loaders.slots import Lease
from loaders.threads import start_thread, stop_at_exit

log = logging.getLogger(__name__)

JOIN_SECONDS = 0.5  # how long close() waits for threads; they end after the sample that they are reading


@dataclass
class Done:
    """A thread's result: a Reading, or the error that reading raised."""

    number: int
    worker: int
    needed: int
    overflowed: bool
    busy_seconds: float
    wait_seconds: float
    reading: Reading | None = None
    error: BaseException | None = None
    is_pickled: bool = False

    def open(self, memory: Callable[[], torch.Tensor]) -> Any:
        if self.error is not None:
            error, self.error = self.error, None  # or the error and the frames in its traceback hold each other
            try:
                raise error
            finally:
                del error
        return self.reading

    def close(self) -> None:
        self.reading = self.error = None


class ThreadPool:
    """`num_workers` threads that read tasks."""

    copies_when_short = False  # a task that finds no slot makes memory of its own

    def __init__(self, reader: Reader, num_workers: int, init_fn: Callable[[int], None] | None) -> None:
        self.num_workers = num_workers
        self.processes: list[Any] = []
        self._loads = [0] * num_workers
        self._shared = shared = _Shared(num_workers)
        if reader.seed is not None and reader.spec is None:
            warn_of_unseeded_reading()
        for worker in range(num_workers):
            shared.threads.append(start_thread(f"loader-{worker}", _work, reader, worker, init_fn, shared))
        stop_at_exit(shared)

    def load(self, worker: int) -> int:
        return self._loads[worker]

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None) -> bool:
        self._loads[worker] += 1
        self._shared.tasks[worker].put((number, task, None if lease is None else lease.memory))
        return True

    def receive(self, timeout: float | None) -> list[Done | Death]:
        events: list[Done | Death] = []
        with suppress(Empty):
            bound = None if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
            events.append(self._shared.results.get(timeout=bound))
            while True:
                events.append(self._shared.results.get_nowait())
        if None in events:  # see _Shared.stop
            raise PoolClosed("the loader was closed")
        for done in events:
            self._loads[done.worker] -= 1
        return events

    def busy_since(self, worker: int) -> float | None:
        return self._shared.began[worker]

    def has_moved_on(self, worker: int) -> bool:
        return False

    def end(self, worker: int, reason: str) -> Death:
        raise WorkerTimeout(
            f"{reason} A thread cannot be replaced as a process can: raise timeout, or use "
            "worker_method='multiprocessing' (loader=workers)"
        )

    def close(self) -> None:
        self._shared.stop(time.monotonic() + JOIN_SECONDS)
        if any(thread.is_alive() for thread in self._shared.threads):
            log.warning("a loader's thread does not come back from its dataset and was left behind")

    def __del__(self) -> None:
        if hasattr(self, "_shared"):
            self._shared.stop(0)


class _Shared:
    """What a pool and its threads share: these must not keep the pool itself alive, and may outlive it."""

    def __init__(self, num_workers: int) -> None:
        self.threads: list[threading.Thread] = []
        self.tasks: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(num_workers)]
        self.results: SimpleQueue[Done] = SimpleQueue()
        self.began: list[float | None] = [None] * num_workers
        self.stopping = False

    def stop(self, deadline: float) -> None:
        """Has the threads end, and waits for them until `deadline` (time.monotonic)."""
        self.stopping = True
        for queue in (*self.tasks, self.results):
            queue.put(None)  # wakes whoever waits
        for thread in self.threads:
            if thread is not threading.current_thread():  # in a finaliser that the garbage collector ran there
                thread.join(max(0.0, deadline - time.monotonic()))

    def mark(self, row: int) -> None:
        """Called before each sample: so a thread ends without reading the rest of its batch."""
        if self.stopping:
            raise _Stopping


class _Stopping(BaseException):
    """Ends a thread's reading."""


def _work(reader: Reader, worker: int, init_fn: Callable[[int], None] | None, shared: _Shared) -> None:
    failed_start = None
    try:
        if init_fn is not None:
            shared.began[worker] = time.monotonic()
            init_fn(worker)
    except BaseException as error:
        failed_start = error
    shared.began[worker] = None
    waited_from = time.perf_counter()
    while (message := shared.tasks[worker].get()) is not None and not shared.stopping:
        number, task, memory = message
        began, shared.began[worker] = time.perf_counter(), time.monotonic()
        room = Room(memory)
        reading = error = None
        try:
            if failed_start is not None:
                raise failed_start
            reading = reader.read(task, room, shared.mark, seeded=False)
        except _Stopping:
            return
        except BaseException as raised:  # SystemExit too: nobody would hear of a thread that ends
            error = raised
        ended, shared.began[worker] = time.perf_counter(), None
        busy, waited = ended - began, began - waited_from
        shared.results.put(Done(number, worker, room.needed, room.overflowed, busy, waited, reading, error))
        del message, memory, room, reading, error  # the consumer's from now on
        waited_from = ended
