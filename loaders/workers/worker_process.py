"""The main process's side of one worker process: starts it, sends it tasks, and ends it."""

from __future__ import annotations

import os
import pickle
import signal
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from ..background import forget, protect_from_children
from .connection import Connection
from .pool import NO_ROW
from .process_main import LEAVING, STOP, Setup, work
from .shared_memory import ADVICE, SharedMemory
from .slots import Slot
from .tasks import Task

BUSY_SECONDS = 0.3  # after it was told to stop, a worker may go on reading a sample so long before it is killed


class WorkerProcess:
    """A worker process, its socket, and its unanswered tasks. Times are those of time.monotonic."""

    def __init__(self, context: Any) -> None:
        self.tasks: dict[int, Task] = {}  # unanswered, by number
        self.slots: dict[int, Slot] = {}  # that it has mapped, by number
        self.is_ready = False  # it has been set up, and answers tasks
        self.is_leaving = False  # it has sent LEAVING: it only runs its exit functions
        self.row = NO_ROW  # what it was reading when its time limit was last checked
        self.began = time.monotonic()  # when it was started, or began its task or sample
        self.start_by: float | None = None  # when it has to report its next step, until it is ready; None: no limit
        self.pidfd = -1  # -1 where the system has none
        self.process: Any = None
        self._context = context
        self.connection, self._end = Connection.pair()

    @property
    def reads_singly(self) -> bool:
        """Whether it reads one of its tasks sample by sample."""
        return any(task.singly for task in self.tasks.values())

    def start(self, reader: Any, memory_fd: int, setup: Setup) -> None:
        """Starts the process. Raises OSError if the system has no process or descriptor left."""
        # The worker inherits the mask, so no signal reaches it before it has reset its parent's handlers.
        forks = self._context.get_start_method() == "fork"
        blocked = signal.valid_signals() if forks else {signal.SIGINT}
        setup.signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            arguments = reader, memory_fd, setup, self._end
            self.process = self._context.Process(target=work, args=arguments, daemon=True)
            self.process.start()
            protect_from_children(self.process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, setup.signal_mask)
            self._end.close()
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except AttributeError:  # an old Python
            pass
        except OSError as error:  # or an old kernel, or a sandbox that forbids it
            if error.errno in ADVICE:
                raise

    def descriptors(self) -> tuple[int, int]:
        """Returns the descriptors that become readable when the worker answers, and when it exits.

        The socket alone does not tell its exit: a child of the worker may keep it open.
        """
        return self.connection.fileno(), self.pidfd if self.pidfd >= 0 else self.process.sentinel

    def submit(self, number: int, task: Task, slot: Slot | None, sent: list[Any]) -> bool:
        """Sends a task, and its slot's descriptor if the worker has not mapped it; False if the socket has no room."""
        place, descriptors, retired = None, list[int](), list[int]()
        if slot is not None:
            if slot.number not in self.slots and isinstance(slot.memory, SharedMemory):
                descriptors = [slot.memory.fd]
                retired = [known for known, other in self.slots.items() if other.is_retired]
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
        if slot is not None and descriptors:
            self.slots = {known: other for known, other in self.slots.items() if known not in retired}
            self.slots[slot.number] = slot
        return True

    def kill(self) -> None:
        """Kills the process. A pidfd is safer than its number, which another process may have if it was reaped."""
        if self.pidfd < 0:
            self.process.kill()
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kills and reaps the process, and closes its descriptors."""
        if self.process is not None and self.process.pid is not None:
            self.kill()
            self.process.join()
            forget(self.process)
        with suppress(EOFError, OSError):
            self.discard_messages()
        self.connection.close()
        self._end.close()
        fd, self.pidfd = self.pidfd, -1  # first, so that no descriptor is closed twice if an exception interrupts this
        if fd >= 0:
            os.close(fd)

    def discard_messages(self) -> None:
        """Receives and drops all messages, so that a worker that is blocked in send() can continue."""
        while (received := self.connection.receive()) is not None:
            self.is_leaving |= received[0] == LEAVING
            self.connection.done()


def wait_for_exit(workers: list[WorkerProcess], deadline: float) -> None:
    """Asks workers to exit, and waits: until `deadline` for those that are leaving, BUSY_SECONDS for busy ones."""
    for worker in workers:
        with suppress(OSError):
            worker.connection.send(STOP)
    kill_busy_at = min(deadline, time.monotonic() + BUSY_SECONDS)
    while workers:
        # The timeout is short because another thread, in the pool's wait(), may get LEAVING and set is_leaving.
        exited = wait([worker.process.sentinel for worker in workers], timeout=0.02)
        for worker in workers:
            with suppress(EOFError, OSError):
                worker.discard_messages()
        now = time.monotonic()
        workers = [
            worker
            for worker in workers
            # multiprocessing takes a worker for alive for ever if the program's SIGCHLD handler has reaped it.
            if worker.process.sentinel not in exited
            and worker.process.is_alive()
            and now < (deadline if worker.is_leaving else kill_busy_at)
        ]
