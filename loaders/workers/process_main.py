"""What a worker process runs: it answers tasks until it is told to stop, or its parent has exited."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import random
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from ..timeline import WorkClock
from .batch_buffer import WorkerBuffer
from .connection import Connection, Control
from .pool import NO_ROW, WHOLE_BATCH, Result
from .reader import Reader, Stopping
from .serialize import dump
from .shared_memory import ADVICE, Forks, MachineFull, Mapping, SharedMemory, full_machine_explained

# The messages that are not tasks or results. Those are pickles, which begin with another byte.
STARTED, READY, LEAVING, STOP = b"started", b"ready", b"leaving", b"stop"
TAKES_DEFAULT = (signal.SIGTERM, signal.SIGCHLD)  # instead of the parent's handler
OF_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
PARENT_SECONDS = 0.5  # how often a worker checks that its parent is alive, where the system has no pidfd


@dataclass
class Setup:
    """The settings of a worker process."""

    worker_id: int
    num_workers: int
    base_seed: int
    init_fn: Callable[[int], None] | None
    parent: int  # the process that the loader runs in
    by_server: bool  # a fork server starts the workers, not the parent itself
    signal_mask: set[int]  # of the thread that started the worker


def work(reader: Any, control_fd: int, setup: Setup, end: socket.socket) -> None:
    """Runs a worker process. If it was not forked, `reader` is a pair (Reader, control_fd): see SpawnedReader."""
    gc.freeze()  # else the collector would write to memory that is shared with the parent, which copies it
    _reset_signals(setup.signal_mask)
    connection = Connection(end, blocking=True)
    connection.send(STARTED)
    if isinstance(reader, tuple):
        reader, control_fd = reader
    threading.Thread(target=_exit_with, args=(setup.parent, setup.by_server), daemon=True).start()
    with suppress(OSError, EOFError):  # the parent has closed the pool, or has exited
        _Worker(reader, control_fd, setup, connection).run()


class _Worker:
    def __init__(self, reader: Reader, control_fd: int, setup: Setup, connection: Connection) -> None:
        self._reader, self._setup, self._connection = reader, setup, connection
        self._where = f"in DataLoader worker process {setup.worker_id}"
        self._slots: dict[int, Mapping] = {}
        self._control = Control(setup.num_workers, control_fd)
        self._control.close()

    def run(self) -> None:
        """Sets up the process, and answers tasks. If the set-up failed, its error is the answer to every task."""
        failed_setup = None
        try:
            _set_up(self._setup, self._reader)
        except Exception:
            failed_setup = _pickled_error(self._where)
        self._connection.send(READY)
        self._clock = WorkClock()
        while (received := self._connection.receive()) and received[0] != STOP and not self._control.is_stopping:
            message, descriptors = received
            number, task, place = pickle.loads(message)
            try:
                self._answer(number, task, place, descriptors, failed_setup)
            except Stopping:
                break
        self._connection.send(LEAVING)

    def _answer(self, number: int, task: Any, place: Any, descriptors: list[int], error: bytes | None) -> None:
        self._clock.begin()
        forks, slot, watched, made = Forks.count, None, None, _Made()
        try:
            try:
                if place is not None:
                    slot = self._slot(place[0], place[1], descriptors)
                    watched = weakref.ref(slot)
            finally:
                self._connection.done()
            if error is None:
                self._mark(WHOLE_BATCH)
                made = self._make(task, slot)
        except Exception:
            error = _pickled_error(self._where)
        self._mark(NO_ROW)
        if place is not None:
            slot = None
            # What the dataset or collate_fn keeps of the batch keeps the slot's array alive. Then the slot may not be
            # written again, nor if a process was forked meanwhile, or if this one could not map it.
            made.holds_slot = watched is None or watched() is not None or Forks.count != forks
            if made.holds_slot:
                self._slots.pop(place[0], None)
        work = self._clock.end(made.collate_seconds)
        overflow = made.overflow
        flags = made.needed, overflow is not None, made.is_odd, made.holds_slot
        message = pickle.dumps(tuple(Result(number, made.payload, error, *flags, work)))
        self._connection.send(message, [] if overflow is None else [overflow.fd])

    def _make(self, task: Any, slot: np.ndarray | None) -> _Made:
        buffer = WorkerBuffer(slot, as_torch=self._reader.seed is None)
        reading = self._reader.read(task, buffer, self._mark)
        payload, overflow, is_odd = dump((reading.batch, reading.skipped), buffer)
        return _Made(payload, overflow, is_odd, buffer.needed, reading.collate_seconds)

    def _slot(self, number: int, retired: list[int], descriptors: list[int]) -> np.ndarray:
        """Returns the bytes, uint8 (capacity,), of a slot, and unmaps the `retired` ones.

        The descriptor of a slot's memory comes with its first task. Raises MachineFull.
        """
        for old in retired:
            self._slots.pop(old, None)
        for fd in descriptors:
            size = os.fstat(fd).st_size
            with full_machine_explained(f"providing {size:,} bytes for a batch"):
                self._slots[number] = Mapping(fd, size, provide=True)
        if number not in self._slots:
            raise MachineFull(f"receiving a slot failed: {ADVICE[errno.EMFILE]}")
        return self._slots[number].array()

    def _mark(self, row: int) -> None:
        """Tells the parent what is read next. Raises Stopping, to abandon the batch, if the parent closes the pool."""
        if self._control.is_stopping:
            raise Stopping
        self._control.rows[self._setup.worker_id] = row


@dataclass
class _Made:
    """A batch that is ready to be sent."""

    payload: Any = None
    overflow: SharedMemory | None = None
    is_odd: bool = False
    needed: int = 0
    collate_seconds: float = 0.0
    holds_slot: bool = False


def _reset_signals(mask: set[int]) -> None:
    """Removes the parent's Python handlers, which a forked worker would run, except those of timers.

    SIGTERM then kills the worker. SIGCHLD takes its default action: if it were ignored, the dataset could not learn
    how its programs ended. The other signals that had a handler, and SIGINT, are ignored: Ctrl-C reaches the whole
    process group, and the parent handles it. Those of timers keep their handlers: a process inherits no timer, so only
    the dataset can have set one, to limit the time for a sample.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number not in OF_TIMERS:
            signal.signal(number, signal.SIG_DFL if number in TAKES_DEFAULT else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _set_up(setup: Setup, reader: Reader) -> None:
    torch.set_num_threads(1)
    seed = setup.base_seed + setup.worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(setup.base_seed, setup.worker_id))
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=setup.worker_id, num_workers=setup.num_workers, seed=seed, dataset=reader.dataset
    )
    if setup.init_fn is not None:
        setup.init_fn(setup.worker_id)


def _exit_with(parent: int, by_server: bool) -> None:
    """Exits when the parent has exited, even while a sample is read, or while a sibling keeps the socket open."""
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # an old Python or kernel, or a sandbox that forbids it
        # A fork server exits with the parent. Otherwise the parent's own number is the one to compare with: it may
        # have exited before this process could ask.
        starter = os.getppid() if by_server else parent
        with suppress(ProcessLookupError):
            while os.getppid() == starter:
                os.kill(parent, 0)
                time.sleep(PARENT_SECONDS)
        os._exit(1)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    os._exit(1)


def _pickled_error(where: str) -> bytes:
    """Returns the exception that is being handled, with its traceback, as a pickle that the parent raises."""
    wrapper = ExceptionWrapper(where=where)
    try:
        return pickle.dumps(wrapper)
    except Exception:  # the class cannot be pickled
        wrapper.exc_type = RuntimeError
        return pickle.dumps(wrapper)
