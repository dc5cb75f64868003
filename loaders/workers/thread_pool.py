"""Worker threads. A thread writes its batch into memory that the consumer then gets: nothing is sent.

They never touch the global generators, which all threads share. A thread that hangs cannot be stopped. It is left
behind, but as a daemon it does not block the interpreter's exit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat, starmap
from queue import Empty, SimpleQueue
from typing import Any

from ..background import start_thread, stop_at_exit
from ..timeline import WorkClock
from .batch_buffer import ThreadBuffer
from .pool import Pool, PoolClosed, Result, WorkerTimeout
from .reader import Reader, Stopping, warn_of_unseeded_reading
from .slots import Lease
from .tasks import Task

log = logging.getLogger(__name__)

# close() waits for the threads JOIN_FACTOR times as long as the longest batch took, and at least JOIN_SECONDS; or
# FIRST_SECONDS, if no batch is done yet.
JOIN_FACTOR, JOIN_SECONDS, FIRST_SECONDS = 3, 0.5, 5.0


class ThreadPool(Pool):
    """`num_workers` threads that read tasks. `timeout` (seconds, 0 for none) is the limit for a task.

    A batch without a slot gets new memory.
    """

    def __init__(
        self, reader: Reader, num_workers: int, init_fn: Callable[[int], None] | None, timeout: float
    ) -> None:
        self.num_workers = num_workers
        self.events = deque[Any]()
        self._timeout = timeout
        self._shared = shared = _Shared(num_workers)
        if reader.seed is not None and reader.spec is None:
            warn_of_unseeded_reading()
        for worker in range(num_workers):
            shared.threads.append(start_thread(f"loader-{worker}", _work, reader, worker, init_fn, shared))
        stop_at_exit(self)

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None, sent: list[Any]) -> bool:
        sent.extend(map(self._shared.tasks[worker].put, ((number, task, None if lease is None else lease.array),)))
        return True

    def wait(self) -> None:
        results = self._shared.results
        while not self.events:
            began = [began for began in self._shared.began if began is not None]
            seconds = None
            if self._timeout:
                oldest = min(began, default=time.monotonic())
                seconds = min(max(0.0, oldest + self._timeout - time.monotonic()), threading.TIMEOUT_MAX)
            with suppress(Empty):
                self.events.extend(map(results.get, (True,), (seconds,)))
                self.events.extend(starmap(results.get_nowait, repeat((), results.qsize())))
            if self._shared.is_stopping:
                self.events.clear()
                raise PoolClosed("the loader was closed")
            if not self.events and began and time.monotonic() >= min(began) + self._timeout:
                raise WorkerTimeout(
                    f"DataLoader timed out after {self._timeout} seconds. A thread cannot be restarted as a process "
                    "can: raise timeout, or use worker_method='multiprocessing' (loader=workers)"
                )

    def stop(self, deadline: float) -> None:
        """Stops the threads at the interpreter's exit, and waits for them until `deadline` (time.monotonic)."""
        self._shared.stop(deadline)

    def close(self) -> None:
        longest = self._shared.longest_seconds
        patience = FIRST_SECONDS if longest is None else max(JOIN_SECONDS, JOIN_FACTOR * longest)
        self._shared.stop(time.monotonic() + patience)
        if any(thread.is_alive() for thread in self._shared.threads):
            log.warning(
                "a worker thread is stuck in the dataset and was left behind: close() waited %.1f s for it", patience
            )

    def __del__(self) -> None:
        if hasattr(self, "_shared"):
            self._shared.stop(0)


class _Shared:
    """What a pool and its threads share. The threads do not refer to the pool, so that they may outlive it."""

    def __init__(self, num_workers: int) -> None:
        self.threads: list[threading.Thread] = []
        self.tasks: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(num_workers)]
        self.results: SimpleQueue[Result | None] = SimpleQueue()
        self.began: list[float | None] = [None] * num_workers  # when each thread began its task; None: it is idle
        self.longest_seconds: float | None = None
        self.is_stopping = False

    def stop(self, deadline: float) -> None:
        """Tells the threads to exit, and waits for them until `deadline` (time.monotonic)."""
        self.is_stopping = True
        for queue in (*self.tasks, self.results):
            queue.put(None)  # wakes whoever waits
        for thread in self.threads:
            # The garbage collector may have called this in the thread itself.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def mark(self, row: int) -> None:
        """Is called before each sample. Raises Stopping if the thread has to exit, to abandon its batch."""
        if self.is_stopping:
            raise Stopping


def _work(reader: Reader, worker: int, init_fn: Callable[[int], None] | None, shared: _Shared) -> None:
    failed_setup: BaseException | None = None
    try:
        if init_fn is not None:
            shared.began[worker] = time.monotonic()
            init_fn(worker)
    except BaseException as error:
        failed_setup = error
    shared.began[worker] = None
    clock = WorkClock()
    while (message := shared.tasks[worker].get()) is not None and not shared.is_stopping:
        number, task, slot = message
        clock.begin()
        shared.began[worker] = time.monotonic()
        buffer = ThreadBuffer(slot)
        reading, failure = None, failed_setup
        try:
            if failed_setup is not None:
                raise failed_setup
            reading = reader.read(task, buffer, shared.mark, seeds_globals=False)
        except Stopping:
            return
        except BaseException as raised:  # SystemExit too: it would end the thread silently
            failure = raised
        work, shared.began[worker] = clock.end(reading.collate_seconds if reading else 0.0), None
        shared.longest_seconds = max(shared.longest_seconds or 0.0, work.seconds)
        shared.results.put(Result(number, reading, failure, buffer.needed, buffer.overflowed, work=work))
        del message, slot, buffer, reading, failure  # the consumer owns them now
