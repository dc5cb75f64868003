"""Worker processes: tasks go to each through a pipe of its own, results come back through another.

There is no shared queue, lock or feeder thread, so nothing that one worker does can hold up or damage another. One
that has ended is started again when a task is submitted to it.
Invariant: the bytes of unanswered tasks in a worker's pipe stay below what a pipe holds, or the worker has no
unanswered task: so the parent never waits to send while a worker waits for it to receive.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from loaders.pools.carrying import Carried
from loaders.pools.results import Death, PoolClosed
from loaders.pools.worker import HEADER, HELLO, Setup, parents_ends, work
from loaders.reading import Reader, Task
from loaders.slots import Lease, full_machine_explained, map_marks
from loaders.transfer import load

PIPE_BYTES = 64 << 10  # what a pipe holds, and what it is made to hold where tasks are large
LARGE_PIPE_BYTES = 1 << 20
LONGEST_SECONDS = 1e6  # that the system lets one wait
JOIN_SECONDS = 0.3  # how long close() waits for workers to leave before it kills them
# How long a worker may take from its start until it says hello: one that was forked while another thread held a lock
# may wait for that for ever, and is killed; the others have to import this module first.
START_SECONDS = {"fork": 30.0, "forkserver": 300.0, "spawn": 300.0}


@dataclass(slots=True)
class Answer:
    """A worker's result: a pickled Reading, or a pickled ExceptionWrapper."""

    number: int
    is_error: bool
    is_pickled: bool
    overflowed: bool  # a descriptor of the memory follows
    needed: int
    busy_seconds: float
    wait_seconds: float
    pickled: bytes
    overflow_fd: int | None = None

    def open(self, memory: Callable[[], torch.Tensor]) -> Any:
        if self.is_error:
            wrapper: ExceptionWrapper = pickle.loads(self.pickled)
            wrapper.reraise()
        return load(self.pickled, memory, self.overflow_fd)

    def close(self) -> None:
        if self.overflow_fd is not None:
            os.close(self.overflow_fd)
            self.overflow_fd = None


class _Worker:
    """A worker process as its parent sees it: pipes, unanswered tasks, and since when it does what it does."""

    def __init__(self, context: BaseContext, reader: Reader, memory_fd: int, setup: Setup) -> None:
        self.unanswered: dict[int, int] = {}  # number -> bytes in the pipe
        self.pipe_bytes = PIPE_BYTES
        self.row = -1  # of its batch, when it was last looked at
        self.has_started = False
        self.began = time.monotonic()
        theirs_tasks, self.tasks = context.Pipe(duplex=False)
        self.results, theirs_results = context.Pipe(duplex=True)  # a socket, which can carry descriptors
        self.pidfd = -1
        self.answered = select.poll()  # a tenth of the time that results.poll() takes
        self.answered.register(self.results.fileno(), select.POLLIN)
        parents_ends.update((self.tasks, self.results))
        method = context.get_start_method()
        self.start_by = self.began + START_SECONDS[method]
        carried = reader if method == "fork" else Carried(reader, memory_fd)
        self.process = context.Process(
            target=work, args=(carried, memory_fd, setup, theirs_tasks, theirs_results), daemon=True
        )
        # The child inherits the mask, so that Ctrl-C does not find it before it has learnt to ignore that.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
            self.pidfd = os.pidfd_open(self.process.pid)
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs_tasks.close()
            theirs_results.close()

    def send(self, number: int, message: bytes) -> bool:
        waiting = sum(self.unanswered.values()) + len(message)
        if waiting > self.pipe_bytes / 2 and self.pipe_bytes == PIPE_BYTES:
            with suppress(OSError):  # a user may have used up their share of large pipes
                self.pipe_bytes = fcntl.fcntl(self.tasks.fileno(), fcntl.F_SETPIPE_SZ, LARGE_PIPE_BYTES)
        if self.unanswered and waiting > self.pipe_bytes / 2:  # small writes take more room than their bytes
            return False
        if self.has_started and not self.unanswered:
            self.began = time.monotonic()
        self.unanswered[number] = len(message)
        with suppress(OSError):  # a worker that has ended: its death is received, and the task is lost with it
            self.tasks.send_bytes(message)
        return True

    def receive(self) -> Answer | None:
        """An answer that is there; None for a hello: a first one, and one when it is set up. Raises at its end."""
        message = self.results.recv_bytes()
        answer = Answer(*HEADER.unpack_from(message), message[HEADER.size :])
        self.began = time.monotonic()
        if answer.number == HELLO:
            self.has_started = True
            return None
        if answer.overflowed:
            answer.overflow_fd = reduction.recv_handle(self.results)
        del self.unanswered[answer.number]
        return answer

    def close(self) -> None:
        """Kills and reaps the process, and closes what belongs to it."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join()
        self.tasks.close()
        self.results.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class ProcessPool:
    """`num_workers` processes that read tasks; the calling thread drives it, one at a time."""

    copies_when_short = True

    def __init__(
        self,
        reader: Reader,
        num_workers: int,
        context: BaseContext,
        base_seed: int,
        init_fn: Callable[[int], None] | None,
        memory_fd: int,
    ) -> None:
        self.num_workers = num_workers
        self._closed = False
        self._taking = threading.Lock()  # a worker out of the list: so it is closed once, by whichever thread
        self._owner = os.getpid()
        self._reader, self._context, self._memory_fd = reader, context, memory_fd
        self._setups = [Setup(id, num_workers, base_seed, init_fn, self._owner) for id in range(num_workers)]
        self._marks = map_marks(memory_fd, num_workers)
        self._workers: list[_Worker | None] = [None] * num_workers
        self.processes: list[Any] = [None] * num_workers
        self._poll = select.poll()
        self._polled: dict[int, int] = {}  # descriptor -> worker
        try:
            for worker_id in range(num_workers):
                self._start(worker_id)
        except BaseException:
            self.close()
            raise

    def load(self, worker: int) -> int:
        return 0 if self._workers[worker] is None else len(self._workers[worker].unanswered)

    def submit(self, worker: int, number: int, task: Task, lease: Lease | None) -> bool:
        place = None if lease is None else (lease.offset, len(lease.memory))
        message = pickle.dumps((number, task, place), pickle.HIGHEST_PROTOCOL)
        if self._workers[worker] is None:
            self._start(worker)
        return self._workers[worker].send(number, message)

    def receive(self, timeout: float | None) -> list[Answer | Death]:
        events: list[Answer | Death] = []
        try:
            events = self._receive(timeout)
        finally:
            if self._closed:  # by another thread, which has taken the workers away
                raise PoolClosed("the loader was closed") from None
        return events

    def _receive(self, timeout: float | None) -> list[Answer | Death]:
        started_by = [worker.start_by for worker in self._workers if worker and not worker.has_started]
        if started_by:
            to_start = min(started_by) - time.monotonic()
            timeout = to_start if timeout is None else min(timeout, to_start)
        events: list[Answer | Death] = []
        ready = self._poll.poll(None if timeout is None else 1000 * min(max(0.0, timeout), LONGEST_SECONDS))
        for worker_id in {self._polled[fd] for fd, _ in ready}:
            if not self._drain(self._workers[worker_id], events):
                events.append(self._bury(worker_id))
        for worker_id, worker in enumerate(self._workers):
            if worker and not worker.has_started and worker.start_by <= time.monotonic():
                seconds = START_SECONDS[self._context.get_start_method()]
                pid = worker.process.pid
                events.append(self.end(worker_id, f"DataLoader worker (pid {pid}) did not start in {seconds:g} s."))
        return events

    def busy_since(self, worker: int) -> float | None:
        its = self._workers[worker]
        return its.began if its is not None and its.has_started and its.unanswered else None

    def has_moved_on(self, worker: int) -> bool:
        its, row = self._workers[worker], self._marks[worker]
        moved, its.row = row != its.row, row
        if moved:
            its.began = time.monotonic()
        return moved

    def end(self, worker: int, reason: str) -> Death:
        self._workers[worker].process.kill()
        death = self._bury(worker)
        death.reason = reason
        return death

    def close(self) -> None:
        """Ends the workers: asked to, those that are idle leave at once; the others are killed. All are reaped.

        May be called while another thread waits in `receive`: the workers' end wakes it.
        """
        self._closed = True
        if os.getpid() != self._owner:  # a forked child that has inherited the object
            return
        workers = [worker for worker in map(self._take, range(self.num_workers)) if worker is not None]
        try:
            for worker in workers:
                with suppress(OSError):
                    os.set_blocking(worker.tasks.fileno(), False)
                    worker.tasks.send_bytes(b"")
            deadline = time.monotonic() + JOIN_SECONDS
            for worker in workers:
                worker.process.join(max(0, deadline - time.monotonic()))
        finally:  # also when a second Ctrl-C comes while it waits
            for worker in workers:
                worker.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else its workers are gone
            self.close()

    def _start(self, worker_id: int) -> None:
        if self._closed:
            raise PoolClosed("the loader was closed")
        with full_machine_explained(f"starting worker {worker_id + 1} of {self.num_workers}"):
            worker = _Worker(self._context, self._reader, self._memory_fd, self._setups[worker_id])
        self._workers[worker_id], self.processes[worker_id] = worker, worker.process
        self._marks[worker_id] = -1
        for fd in (worker.results.fileno(), worker.pidfd):  # its pipe alone may be held open by a child of its own
            self._polled[fd] = worker_id
            self._poll.register(fd, select.POLLIN)

    def _drain(self, worker: _Worker, events: list[Answer | Death]) -> bool:
        """Receives all that is there; False if the worker has ended."""
        has_ended = not worker.process.is_alive()  # asked first: what it sent before its end is received
        try:
            while worker.answered.poll(0):
                if answer := worker.receive():
                    events.append(answer)
        except (EOFError, OSError):
            return False
        return not has_ended

    def _take(self, worker_id: int) -> _Worker | None:
        with self._taking:
            worker, self._workers[worker_id] = self._workers[worker_id], None
        return worker

    def _bury(self, worker_id: int) -> Death:
        worker = self._take(worker_id)
        if worker is None:
            raise PoolClosed("the loader was closed")
        for fd in (worker.results.fileno(), worker.pidfd):
            self._poll.unregister(fd)
            del self._polled[fd]
        worker.process.join(JOIN_SECONDS)
        worker.close()
        code = worker.process.exitcode
        if code is not None and code < 0:
            reason = f"is killed by signal: {signal.strsignal(-code)}."
        else:
            reason = f"exited unexpectedly with exit code {code}."
        return Death(worker_id, f"DataLoader worker (pid {worker.process.pid}) {reason}", self._marks[worker_id])
