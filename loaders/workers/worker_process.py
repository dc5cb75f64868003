"""The main process's side of one worker process: starts it, sends it tasks, and ends it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from ..background import forget, protect_from_children
from .connection import Connection
from .pool import NO_ROW
from .process_main import READY, ROWS, Setup, work
from .shared_memory import ADVICE
from .slots import Slot
from .spawning import SpawnedSetup
from .tasks import Task

INTERRUPTED_SECONDS = 0.3  # after a Ctrl-C, a worker may go on reading a sample so long before it is killed


class WorkerProcess:
    """A worker process, its socket, and its unanswered tasks. Times are those of time.monotonic.

    rows: see ProcessPool; rows_fd: the descriptor of their memory. Raises OSError if the system has no process or
    descriptor left.
    """

    def __init__(self, context: Any, setup: Setup | SpawnedSetup, number: int, rows: np.ndarray, rows_fd: int) -> None:
        self.number = number
        self.tasks: dict[int, Task] = {}  # unanswered, by number
        self.slots: dict[int, Slot] = {}  # that it has mapped, by number
        self.is_ready = False  # it has been set up, and answers tasks
        self.began = time.monotonic()  # when it was started, or began its task or sample
        self.began_row = NO_ROW  # what it was reading when its time limit was last checked
        self._closing = threading.RLock()  # a signal handler may close the loader, too
        self._rows = rows
        rows[number] = NO_ROW
        self.pidfd = -1  # -1 where the system has none
        self.process: Any = None
        self.connection, end = Connection.pair()
        self._alive = -1  # a pipe's end that is open as long as this process lives: see die_with_parent
        # The worker inherits the mask, so no signal reaches it before it has reset its parent's handlers.
        forks = context.get_start_method() == "fork"
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() if forks else {signal.SIGINT})
        try:
            alive, self._alive = os.pipe()
            _alive.add(self._alive)
            try:
                self.connection.send(ROWS, [rows_fd, alive])
            finally:
                os.close(alive)
            self.process = context.Process(target=work, args=(setup, number, mask, end), daemon=True)
            self.process.start()
            protect_from_children(self.process)
            self.pidfd = _pidfd_open(self.process.pid)
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            end.close()

    @property
    def row(self) -> int:
        """What it is reading: see Death.row."""
        return int(self._rows[self.number])

    def descriptors(self) -> tuple[int, int]:
        """Returns the descriptors that become readable when the worker answers, and when it exits.

        The socket alone does not tell its exit: a child of the worker may keep it open.
        """
        return self.connection.fileno(), self.pidfd if self.pidfd >= 0 else self.process.sentinel

    def submit(self, number: int, task: Task, slot: Slot | None, sent: list[Any]) -> bool:
        """Sends a task, and its slot's descriptor if the worker has not mapped it; False if the socket has no room."""
        place, descriptors, known = None, list[int](), self.slots
        if slot is not None:
            retired: list[int] = []
            if slot.number not in known and slot.memory is not None:
                descriptors = [slot.memory.fd]
                retired = [at for at, other in known.items() if other.is_retired]
                known = {at: other for at, other in known.items() if at not in retired}
                known[slot.number] = slot
            place = slot.number, retired
        message = pickle.dumps((number, task, place), pickle.HIGHEST_PROTOCOL)
        if self.is_ready and not self.tasks:
            self.began = time.monotonic()
        self.tasks[number] = task  # before it is sent: its time limit counts, even if an exception interrupts this
        try:
            if not self.connection.send(message, descriptors, sent):
                del self.tasks[number]
                return False
        except (BrokenPipeError, ConnectionResetError):
            sent.append(None)  # it has died: the pool's wait() reports that, and the task is retried
            return True
        self.slots = known
        return True

    def close(self) -> None:
        """Kills and reaps the process, and closes its descriptors. May be called again, by another thread too."""
        with self._closing:
            if self.process is not None and self.process.pid is not None:
                if self.pidfd < 0:
                    self.process.kill()
                else:  # safer than its number, which another process may have if this one was reaped
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                self.process.join()
                forget(self.process)
            with suppress(EOFError, OSError):
                self.discard_messages()
            self.connection.close()
            fd, self._alive = self._alive, -1  # first: an exception that interrupts this must not close it twice
            if fd in _alive:  # it is closed already in a forked child
                _alive.discard(fd)
                os.close(fd)
            fd, self.pidfd = self.pidfd, -1
            if fd >= 0:
                os.close(fd)

    def discard_messages(self) -> None:
        """Receives and drops all messages, so that a worker that is blocked in send() can continue."""
        while (received := self.connection.receive()) is not None:
            self.is_ready |= received[0] == READY
            self.connection.done()


def _close_in_child() -> None:
    while _alive:
        os.close(_alive.pop())


_alive: set[int] = set()  # see WorkerProcess; open in this process only, and not in its forked children
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _pidfd_open(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError) as error:  # an old Python or kernel, or a sandbox that forbids it
        if getattr(error, "errno", None) in ADVICE:
            raise
        return -1


def wait_for_exit(workers: list[WorkerProcess], deadline: float) -> None:
    """Asks workers to exit, and waits for them until `deadline`. One that reads a sample finishes it first.

    It must not be killed meanwhile: it may hold a lock that later workers need, or be writing a file. After a Ctrl-C
    it is killed soon all the same, because a user waits for the end of the program.
    """
    error = sys.exc_info()[1]
    if not threading.main_thread().is_alive():  # the program ends; in a notebook, last_value may be an old error
        error = getattr(sys, "last_value", None)
    is_interrupted = isinstance(error, KeyboardInterrupt)
    kill_busy_at = time.monotonic() + INTERRUPTED_SECONDS if is_interrupted else deadline
    for worker in workers:
        with suppress(OSError):
            worker.connection.socket.shutdown(socket.SHUT_WR)
    while workers and (now := time.monotonic()) < deadline:
        exited = wait([worker.process.sentinel for worker in workers], timeout=0.02)
        for worker in workers:
            with suppress(EOFError, OSError):
                worker.discard_messages()
        workers = [
            worker
            for worker in workers
            # multiprocessing takes a worker for alive for ever if the program's SIGCHLD handler has reaped it.
            if worker.process.sentinel not in exited
            and worker.process.is_alive()
            and (now < kill_busy_at or (worker.is_ready and worker.row == NO_ROW))
        ]
