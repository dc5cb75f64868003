"""The main process's side of worker processes: sends tasks, receives results, notices deaths and hangs.

Each worker has its own socket. Workers share no queue, lock or feeder thread, so that no worker can block or damage
another, and the main process never waits in the middle of a message. A worker that has died is restarted when a task
is submitted to it. A worker that exceeds its time limit is killed, and reported as dead.
"""

from __future__ import annotations

import errno
import os
import pickle
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any

from torch._utils import ExceptionWrapper

from ..background import EXIT_SECONDS, stop_at_exit
from .connection import Control
from .pool import NO_ROW, Death, Pool, PoolClosed, Result
from .process_main import LEAVING, READY, STARTED, Setup
from .reader import Reader, Reading
from .serialize import Payload, load
from .shared_memory import ADVICE, MachineFull, SharedMemory, full_machine_explained
from .slots import Lease
from .spawning import SpawnedReader
from .tasks import Task
from .worker_process import BUSY_SECONDS, WorkerProcess, wait_for_exit

LONGEST_SECONDS = 1e6  # poll() accepts no longer timeout
LOOK_SECONDS = 0.5  # how often to check that workers are alive, where the system has no pidfd
# How long a worker may take to report that it has started. One that was forked while another thread held a lock may
# wait for that lock for ever; one that was not forked has to import modules first.
START_SECONDS = {"fork": 30.0, "forkserver": 300.0, "spawn": 300.0}
SETUP_FACTOR = 10  # the set-up of a restarted worker may take this many times as long as it took before


class ProcessPool(Pool):
    """Up to `num_workers` processes that read tasks. `started` of them start at once, each other with its first task.

    One thread at a time drives the pool; another may close it. `timeout` (seconds, 0 for none) is the limit for a
    task, or for a sample if the task is read sample by sample.
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
        self._leaving: deque[WorkerProcess] = deque()  # taken out of it by `close`
        self._taking = threading.Lock()  # held while a worker is taken out of the list: one thread only may close it
        self._owner = os.getpid()
        self._closed = False
        self._timeout = timeout
        self._context = context
        with full_machine_explained("making shared memory for workers"):
            self._control = Control(num_workers)
        self._method = context.get_start_method()
        self._reader = reader if self._method == "fork" else SpawnedReader(reader, self._control.fd, init_fn)
        self._setup = Setup(0, num_workers, base_seed, init_fn, self._owner, self._method == "forkserver", set())
        self._setup_seconds: dict[int, float] = {}  # the longest set-up of each worker so far
        self._poll = select.poll()
        self._polled: dict[int, int] = {}  # descriptor -> worker
        stop_at_exit(self)
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
        try:
            while not self.events and not self._closed:
                self._wait_and_receive()
        finally:
            if self._closed:  # by another thread, which has ended the workers
                raise PoolClosed("the loader was closed") from None

    def open(self, result: Result, lease: Lease | None) -> Reading | BaseException:
        if result.error is not None:
            return _unwrapped(pickle.loads(result.error))
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
        """Ends the workers at the interpreter's exit, by `deadline`."""
        self._close(deadline)

    def close(self) -> None:
        """Ends and reaps all workers: an idle one may run its exit functions, a busy one is killed.

        It may be called while another thread is in `wait`, which then raises PoolClosed.
        """
        self._close(time.monotonic() + EXIT_SECONDS)

    def _start(self, worker_id: int) -> WorkerProcess:
        if self._closed:
            raise PoolClosed("the loader was closed")
        with full_machine_explained(f"starting worker {worker_id + 1} of {self.num_workers}"):
            worker = self._workers[worker_id] = WorkerProcess(self._context)
            self._control.rows[worker_id] = NO_ROW
            try:
                worker.start(self._reader, self._control.fd, replace(self._setup, worker_id=worker_id))
            except BaseException:
                self._workers[worker_id] = None
                worker.close()
                raise
        self.processes[worker_id] = worker.process
        worker.start_by = worker.began + START_SECONDS[self._method]
        for fd in worker.descriptors():
            self._polled[fd] = worker_id
            self._poll.register(fd, select.POLLIN)
        return worker

    def _wait_and_receive(self) -> None:
        """Waits for a message, a death or a time limit, and appends the results and deaths to `events`."""
        limits = [limit for worker in self._workers if worker and (limit := self._limit(worker)) is not None]
        if not all(worker.pidfd >= 0 for worker in self._workers if worker):
            limits.append(time.monotonic() + LOOK_SECONDS)
        # An interrupted call may have received a message that it could not handle.
        arrived = {at for at, worker in enumerate(self._workers) if worker and worker.connection.has_arrived}
        seconds = 0 if arrived else min(min(limits) - time.monotonic(), LONGEST_SECONDS) if limits else None
        ready = self._poll.poll(None if seconds is None else max(0.0, 1000 * seconds))
        for worker_id in arrived | {self._polled[fd] for fd, _ in ready}:
            worker = self._workers[worker_id]
            if worker and not self._drain(worker_id, worker):
                self._reap(worker_id, worker)
        for worker_id, worker in enumerate(self._workers):
            if worker is None:
                continue
            if worker.pidfd < 0 and not self._drain(worker_id, worker):
                self._reap(worker_id, worker)
            elif (limit := self._limit(worker)) is not None and limit <= time.monotonic():
                self._enforce_limit(worker_id, worker)

    def _limit(self, worker: WorkerProcess) -> float | None:
        """Returns the time (time.monotonic) at which the worker exceeds its limit, or None if it has none."""
        if not worker.is_ready:
            return worker.start_by
        return worker.began + self._timeout if self._timeout and worker.tasks else None

    def _enforce_limit(self, worker_id: int, worker: WorkerProcess) -> None:
        """Kills a worker at its time limit, unless it reads sample by sample and has begun another sample."""
        row = int(self._control.rows[worker_id])
        if worker.is_ready and worker.reads_singly and row != worker.row:
            worker.row, worker.began = row, time.monotonic()
            return
        if worker.is_ready:
            reason = f"DataLoader timed out after {self._timeout} seconds."
        else:
            seconds = (worker.start_by or 0.0) - worker.began
            reason = f"DataLoader worker (pid {worker.process.pid}) did not start in {seconds:g} s."
        worker.kill()
        self._reap(worker_id, worker, reason)

    def _drain(self, worker_id: int, worker: WorkerProcess) -> bool:
        """Receives all messages that have arrived; False if the worker has died."""
        is_dead = not worker.process.is_alive()  # before receiving, so that no message from before its death is missed
        try:
            while (received := worker.connection.receive()) is not None:
                self._receive(worker_id, worker, *received)
                worker.connection.done()
        except (EOFError, OSError):
            return False
        return not is_dead

    def _receive(self, worker_id: int, worker: WorkerProcess, message: bytes, fds: list[int]) -> None:
        now = time.monotonic()
        if message == STARTED:
            # Its set-up, with worker_init_fn, has no limit the first time; later, several times the time that it took.
            known = self._setup_seconds.get(worker_id)
            worker.start_by = None if known is None else now + START_SECONDS[self._method] + SETUP_FACTOR * known
        elif message == READY:
            self._setup_seconds[worker_id] = max(self._setup_seconds.get(worker_id, 0.0), now - worker.began)
            worker.is_ready = True
        elif message == LEAVING:
            worker.is_leaving = True
        else:
            result = Result(*pickle.loads(message))
            overflow = SharedMemory(os.dup(fds[-1])) if fds else None
            self.events.append(result._replace(payload=result.payload and (result.payload, overflow)))
            worker.tasks.pop(result.number, None)
        worker.began = now

    def _reap(self, worker_id: int, worker: WorkerProcess, reason: str = "") -> None:
        """Reaps a dead worker, and reports its death. Raises PoolClosed if another thread has closed the pool."""
        if self._closed:
            raise PoolClosed("the loader was closed")
        worker.process.join(BUSY_SECONDS)
        code = worker.process.exitcode
        if not reason and code is not None and code < 0:
            reason = f"DataLoader worker (pid {worker.process.pid}) is killed by signal: {signal.strsignal(-code)}."
        elif not reason:
            reason = f"DataLoader worker (pid {worker.process.pid}) exited unexpectedly with exit code {code}."
        death = Death(worker_id, reason, int(self._control.rows[worker_id]))
        self._stop_polling(worker_id)
        worker.close()
        self.events.append(death)
        if self._take(worker_id) is None:
            raise PoolClosed("the loader was closed")

    def _take(self, worker_id: int) -> WorkerProcess | None:
        with self._taking:
            worker, self._workers[worker_id] = self._workers[worker_id], None
        return worker

    def _stop_polling(self, worker_id: int) -> None:
        for fd in [fd for fd, polled in self._polled.items() if polled == worker_id]:
            with suppress(KeyError):
                self._poll.unregister(fd)
            self._polled.pop(fd, None)

    def _close(self, deadline: float) -> None:
        self._closed = True
        if os.getpid() != self._owner:  # a forked child inherits this object, but the workers are its parent's
            return
        with self._taking:
            for worker_id, worker in enumerate(self._workers):
                if worker is not None and worker not in self._leaving:
                    self._leaving.append(worker)  # before it is taken: an interrupted call is finished by the next one
                self._workers[worker_id] = None
        try:
            if self._leaving:
                self._control.stop()
                wait_for_exit(list(self._leaving), deadline)
        finally:  # also if another Ctrl-C interrupts the wait
            for worker in list(self._leaving):
                worker.close()
                with suppress(ValueError):  # another thread closes the pool, too
                    self._leaving.remove(worker)
            if isinstance(self._reader, SpawnedReader):
                self._reader.close()
            self._control.close()


def _unwrapped(wrapper: ExceptionWrapper) -> BaseException:
    """Returns a worker's exception as torch raises it: of the same class, with the worker's traceback as text."""
    try:
        wrapper.reraise()
    except BaseException as error:
        return error
    raise AssertionError("reraise() returned")
