"""The main process's side of worker processes: sends tasks, receives results, notices deaths and hangs.

Each worker has its own socket. Workers share no queue, lock or feeder thread, so that no worker can block or damage
another, and the main process never waits in the middle of a message. A worker that has died is restarted when a task
is submitted to it. A worker that exceeds its time limit is killed, and reported as dead.
"""

from __future__ import annotations

import errno
import math
import os
import pickle
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np

from ..background import EXIT_SECONDS, stop_at_exit
from .errors import raised_again
from .pool import NEVER_BEGAN, NO_ROW, SET_UP, Death, Pool, PoolClosed, Result
from .process_main import READY, Setup
from .reader import Reader, Reading
from .serialize import Payload, initialise_torch, load
from .shared_memory import (
    ADVICE,
    MachineFull,
    SharedMemory,
    create_shared_memory,
    full_machine_explained,
    page_aligned,
)
from .slots import Lease
from .spawning import SpawnedSetup, name_unpicklable
from .tasks import Task
from .worker_process import WorkerProcess, wait_for_exit

LONGEST_SECONDS = 1e6  # poll() accepts no longer timeout
REAP_SECONDS = 0.3  # how long to wait for the exit code of a worker that has closed its socket
LOOK_SECONDS = 0.5  # how often to check that workers are alive, where the system has no pidfd
# How long a worker may take until its set-up begins: one that was forked while another thread held a lock may wait for
# that lock for ever, one that was not forked has to import modules first. The set-up itself, with worker_init_fn, has
# no limit the first time; in a restarted worker it may take SETUP_FACTOR times as long.
START_SECONDS, SETUP_FACTOR = 120.0, 10


class ProcessPool(Pool):
    """Up to `num_workers` processes that read tasks. `started` of them start at once, each other with its first task.

    One thread at a time drives the pool; another may close it. `timeout` (seconds, 0 for none) is the limit for a
    task, or for a sample if the task is read sample by sample. Without a seed it counts, as torch's, only while the
    consumer waits.

    `_rows`, int64 in shared memory, tells which row each worker is reading (see Death.row); its last item is 1 if the
    workers have to stop.
    """

    writes_to_slots = True

    def __init__(
        self,
        reader: Reader,
        num_workers: int,
        context: BaseContext,
        base_seed: int,
        init_fn: Callable[[int], None] | None,
        timeout: float,
        started: int,
    ) -> None:
        self.num_workers = num_workers
        self.events = deque[Result | Death]()
        self.processes: list[Any] = [None] * num_workers
        self._workers: list[WorkerProcess | None] = [None] * num_workers
        self._owner = os.getpid()
        self._closed = False
        self._setup_seconds: dict[int, float] = {}  # how long each worker took until it was ready
        self._timeout = timeout
        self._waits_since = 0.0  # time.monotonic
        self._context = context
        with full_machine_explained("making shared memory for workers"):
            self._memory = SharedMemory(create_shared_memory(page_aligned(8 * (num_workers + 1))))
            self._rows = self._memory.array().view(np.int64)
        self._memory.is_delivered = True  # it stays mapped in a forked child, which may use this object
        self._setup = Setup(reader, num_workers, base_seed, init_fn)
        self._spawned = None if context.get_start_method() == "fork" else SpawnedSetup(self._setup)
        self._poll = select.poll()
        self._polled: dict[int, int] = {}  # descriptor -> worker
        stop_at_exit(self)
        initialise_torch()
        try:
            for worker_id in range(started):
                self._start(worker_id)
        except BaseException:
            self.close()
            raise

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None, sent: list[Any]) -> bool:
        process = self._workers[worker] or self._start(worker)
        with full_machine_explained("sending a task to a worker"):
            return process.submit(number, task, None if lease is None else lease.slot, sent)

    def wait(self) -> None:
        self._waits_since = time.monotonic()
        try:
            while not self.events and not self._closed:
                self._wait_and_receive()
        finally:
            if self._closed:  # by another thread, which has ended the workers
                raise PoolClosed("the loader was closed") from None

    def open(self, result: Result, lease: Lease | None) -> Reading | BaseException:
        if result.error is not None:
            return raised_again(result.error)
        payload, overflow = result.payload
        if result.overflowed and overflow is None:
            raise MachineFull(f"receiving a batch from a worker failed: {ADVICE[errno.EMFILE]}")
        memory = None
        if overflow is not None:
            with full_machine_explained("mapping a batch into memory"):
                memory = overflow.array()
            overflow.is_delivered = True
        return Reading(*load(Payload(*payload), None if lease is None else lease.array, memory))

    def stop(self, deadline: float) -> None:
        """Ends and reaps all workers. They finish their sample and run their exit functions; `deadline` kills them.

        It may be called while another thread is in `wait`, which then raises PoolClosed.
        """
        self._closed = True
        if os.getpid() != self._owner:  # a forked child inherits this object, but the workers are its parent's
            return
        workers = [worker for worker in self._workers if worker is not None]
        self._rows[-1] = 1
        try:
            wait_for_exit(workers, deadline)
        finally:  # also if another Ctrl-C interrupts the wait
            for worker in workers:
                worker.close()
                self._workers[worker.number] = None
            if self._spawned is not None:
                self._spawned.close()
            self._memory.close()

    def close(self) -> None:
        self.stop(time.monotonic() + EXIT_SECONDS)

    def _start(self, worker_id: int) -> WorkerProcess:
        if self._closed:
            raise PoolClosed("the loader was closed")
        setup = self._spawned or self._setup
        with full_machine_explained(f"starting worker {worker_id + 1} of {self.num_workers}"):
            try:
                worker = WorkerProcess(self._context, setup, worker_id, self._rows, self._memory.fd)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise name_unpicklable(self._setup, error) from error
        self._workers[worker_id], self.processes[worker_id] = worker, worker.process
        for fd in worker.descriptors():
            self._polled[fd] = worker_id
            self._poll.register(fd, select.POLLIN)
        return worker

    def _wait_and_receive(self) -> None:
        """Waits for a message, a death or a time limit, and appends the results and deaths to `events`."""
        workers = [(worker_id, worker) for worker_id, worker in enumerate(self._workers) if worker is not None]
        # An interrupted call may have received a message that it could not handle.
        ready = {worker_id for worker_id, worker in workers if worker.connection.has_arrived}
        longest = LONGEST_SECONDS if all(worker.pidfd >= 0 for _, worker in workers) else LOOK_SECONDS
        limit = min((self._limit(worker) for _, worker in workers), default=math.inf)
        seconds = 0.0 if ready else max(0.0, min(limit - time.monotonic(), longest))
        ready |= {self._polled[fd] for fd, _ in self._poll.poll(1000 * seconds)}
        for worker_id, worker in workers:
            if (worker_id in ready or worker.pidfd < 0) and not self._drain(worker):
                self._reap(worker)
            elif self._limit(worker) <= time.monotonic():
                self._enforce_limit(worker)

    def _limit(self, worker: WorkerProcess) -> float:
        """Returns the time (time.monotonic) at which the worker exceeds its limit."""
        if not worker.is_ready:
            known = self._setup_seconds.get(worker.number, math.inf) if worker.row == SET_UP else 0.0
            return worker.began + START_SECONDS + SETUP_FACTOR * known
        began = worker.began if self._setup.reader.seed is not None else max(worker.began, self._waits_since)
        return began + self._timeout if self._timeout and worker.tasks else math.inf

    def _enforce_limit(self, worker: WorkerProcess) -> None:
        """Ends a worker at its time limit, unless it reads sample by sample and has begun another sample."""
        row, reads_singly = worker.row, any(task.singly for task in worker.tasks.values())
        if worker.is_ready and reads_singly and row != worker.began_row:
            worker.began_row, worker.began = row, time.monotonic()
            return
        if worker.is_ready:
            reason = f"DataLoader timed out after {self._timeout} seconds."
        else:
            seconds = time.monotonic() - worker.began
            reason = f"DataLoader worker (pid {worker.process.pid}) did not start in {seconds:.0f} s."
        self._reap(worker, reason)

    def _drain(self, worker: WorkerProcess) -> bool:
        """Receives all messages that have arrived; False if the worker has died."""
        is_dead = not worker.process.is_alive()  # before receiving, so that no message from before its death is missed
        try:
            while (received := worker.connection.receive()) is not None:
                self._receive(worker, *received)
                worker.connection.done()
        except (EOFError, OSError):
            return False
        return not is_dead

    def _receive(self, worker: WorkerProcess, message: bytes, fds: list[int]) -> None:
        if message == READY:
            worker.is_ready = True
            self._setup_seconds[worker.number] = time.monotonic() - worker.began
        else:
            result = Result(*pickle.loads(message))
            overflow = SharedMemory(os.dup(fds[-1])) if fds else None
            self.events.append(result._replace(payload=result.payload and (result.payload, overflow)))
            worker.tasks.pop(result.number, None)
        worker.began = time.monotonic()

    def _reap(self, worker: WorkerProcess, reason: str = "") -> None:
        """Reports a worker's death, and ends it. Raises PoolClosed if another thread closes the pool."""
        if self._closed:
            raise PoolClosed("the loader was closed")
        row = worker.row
        if not reason:
            worker.process.join(REAP_SECONDS)
            code = worker.process.exitcode
            how = f"exited unexpectedly with exit code {code}"
            if code is not None and code < 0:
                how = f"is killed by signal: {signal.strsignal(-code)}"
            elif row == NO_ROW and not worker.is_ready:
                row = NEVER_BEGAN
            reason = f"DataLoader worker (pid {worker.process.pid}) {how}."
        death = Death(worker.number, reason, row)
        for fd in worker.descriptors():
            self._polled.pop(fd, None)
            with suppress(KeyError, ValueError):  # closed by another thread
                self._poll.unregister(fd)
        worker.close()
        self.events.append(death)
        self._workers[worker.number] = None
        if self._closed:
            raise PoolClosed("the loader was closed")
