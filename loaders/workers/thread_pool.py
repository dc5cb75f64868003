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
from functools import partial
from itertools import repeat, starmap
from queue import Empty, SimpleQueue
from typing import Any

from ..background import start_thread, stop_at_exit
from ..timeline import WorkClock
from .batch_buffer import BatchBuffer
from .pool import Pool, PoolClosed, Result, WorkerTimeout, answer
from .reader import Reader, Reading, Stopping, warn_of_unseeded_reading
from .slots import Lease
from .tasks import Task

log = logging.getLogger(__name__)

# close() waits for the threads JOIN_FACTOR times as long as the longest batch took, and at least JOIN_SECONDS; or
# FIRST_SECONDS, if no batch is done yet.
JOIN_FACTOR, JOIN_SECONDS, FIRST_SECONDS = 3, 0.5, 5.0


class ThreadPool(Pool):
    """`num_workers` threads that read tasks. `timeout` (seconds, 0 for none) is the limit for a task.

    A batch without a slot gets new memory. The threads refer to the pool, so it has to be closed.
    """

    def __init__(
        self, reader: Reader, num_workers: int, init_fn: Callable[[int], None] | None, timeout: float
    ) -> None:
        self.num_workers = num_workers
        self.events = deque[Any]()
        self._reader, self._init_fn, self._timeout = reader, init_fn, timeout
        self._tasks: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(num_workers)]
        self._results: SimpleQueue[Result | None] = SimpleQueue()
        self._began: list[float | None] = [None] * num_workers  # when each thread began its task; None: it is idle
        self._longest_seconds: float | None = None  # that a batch has taken
        self._is_stopping = False
        self._threads: list[threading.Thread] = []
        if reader.seed is not None and reader.spec is None:
            warn_of_unseeded_reading()
        stop_at_exit(self)
        for worker in range(num_workers):
            self._threads.append(start_thread(f"loader-{worker}", self._work, worker))

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None, sent: list[Any]) -> bool:
        sent.extend(map(self._tasks[worker].put, ((number, task, None if lease is None else lease.array),)))
        return True

    def wait(self) -> None:
        results = self._results
        while not self.events:
            began = [began for began in self._began if began is not None]
            seconds = None
            if self._timeout:
                oldest = min(began, default=time.monotonic())
                seconds = min(max(0.0, oldest + self._timeout - time.monotonic()), threading.TIMEOUT_MAX)
            with suppress(Empty):
                self.events.extend(map(results.get, (True,), (seconds,)))
                self.events.extend(starmap(results.get_nowait, repeat((), results.qsize())))
            if self._is_stopping:
                self.events.clear()
                raise PoolClosed("the loader was closed")
            if not self.events and began and time.monotonic() >= min(began) + self._timeout:
                raise WorkerTimeout(
                    f"DataLoader timed out after {self._timeout} seconds. A thread cannot be restarted as a process "
                    "can: raise timeout, or use worker_method='multiprocessing' (loader=workers)"
                )

    def stop(self, deadline: float) -> None:
        """Tells the threads to exit, and waits for them until `deadline` (time.monotonic)."""
        self._is_stopping = True
        for queue in (*self._tasks, self._results):
            queue.put(None)  # wakes whoever waits
        for thread in self._threads:
            # The garbage collector may have called this in the thread itself.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        longest = self._longest_seconds
        patience = FIRST_SECONDS if longest is None else max(JOIN_SECONDS, JOIN_FACTOR * longest)
        self.stop(time.monotonic() + patience)
        if any(thread.is_alive() for thread in self._threads):
            log.warning(
                "a worker thread is stuck in the dataset and was left behind: close() waited %.1f s for it", patience
            )
        self._threads.clear()  # the interpreter's exit does not wait for them again

    def _work(self, worker: int) -> None:
        failed_setup: BaseException | None = None
        try:
            if self._init_fn is not None:
                self._began[worker] = time.monotonic()
                self._init_fn(worker)
        except BaseException as error:
            failed_setup = error
        self._began[worker] = None

        def read(task: Task, buffer: BatchBuffer, reading: Reading) -> None:
            if failed_setup is not None:
                raise failed_setup
            self._reader.read(task, buffer, reading, self._mark, seeds=False)

        clock = WorkClock()
        while (message := self._tasks[worker].get()) is not None and not self._is_stopping:
            number, task, slot = message
            self._began[worker] = time.monotonic()
            # SystemExit is caught too: it would end the thread silently.
            result = answer(number, partial(read, task), slot, clock, BaseException)
            self._began[worker] = None
            self._longest_seconds = max(self._longest_seconds or 0.0, result.work.seconds)
            self._results.put(result)
            del message, slot, result  # the consumer owns them now

    def _mark(self, row: int) -> None:
        """Is called before each sample. Raises Stopping if the thread has to exit, to abandon its batch."""
        if self._is_stopping:
            raise Stopping
