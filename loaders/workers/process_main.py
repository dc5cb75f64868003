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
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from ..timeline import WorkClock
from .batch_buffer import WorkerBuffer
from .connection import Connection
from .errors import pickled_error
from .pool import NO_ROW, SET_UP, WHOLE_BATCH, Result
from .reader import Reader, Reading, Stopping
from .serialize import Payload, dump
from .shared_memory import ADVICE, MachineFull, SharedMemory, array_on, full_machine_explained, map_memory

ROWS, READY = b"rows", b"ready"  # the first message to a worker, and from it; all others are pickles
TAKES_DEFAULT = (signal.SIGTERM, signal.SIGCHLD)  # instead of the parent's handler
OF_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)


@dataclass
class Setup:
    """What all worker processes of a pool need to begin."""

    reader: Reader
    num_workers: int
    base_seed: int
    init_fn: Callable[[int], None] | None


def work(setup: Setup, worker_id: int, mask: set[int], end: socket.socket) -> None:
    """Runs a worker process, which has its end of a Connection. mask: the signals that its parent's thread blocks."""
    gc.freeze()  # else the collector would write to memory that is shared with the parent, which copies it
    _reset_signals(mask)
    if hasattr(torch.multiprocessing, "_set_thread_name"):
        torch.multiprocessing._set_thread_name("pt_data_worker")  # as torch's workers are called in ps and top
    with suppress(OSError, EOFError, Stopping):  # the parent has closed the pool, or has exited
        _Worker(setup, worker_id, Connection(end, blocking=True)).run()
    setup.reader.close()


class _Worker:
    forks = 0  # goes up before a fork of this process, and after it

    def __init__(self, setup: Setup, worker_id: int, connection: Connection) -> None:
        self._setup, self._id, self._connection = setup, worker_id, connection
        self._where = f"in DataLoader worker process {worker_id}"
        self._slots: dict[int, Any] = {}  # mappings, by number
        received = connection.receive()
        assert received is not None  # it is a blocking connection
        rows, parent = received[1]
        die_with_parent(os.dup(parent))
        self._rows = array_on(map_memory(rows)).view(np.int64)  # see ProcessPool
        connection.done()

    def run(self) -> None:
        """Sets up the process, and answers tasks. If the set-up failed, its error is the answer to every task."""
        failed_setup = None
        self._rows[self._id] = SET_UP
        try:
            _set_up(self._setup, self._id)
        except Exception:
            failed_setup = pickled_error(self._where)
        self._rows[self._id] = NO_ROW
        self._connection.send(READY)
        self._clock = WorkClock()
        while received := self._connection.receive():
            self._mark(NO_ROW)
            self._answer(received[1], failed_setup, *pickle.loads(received[0]))

    def _answer(self, descriptors: list[int], error: bytes | None, number: int, task: Any, place: Any) -> None:
        self._clock.begin()
        forks, slot, watched, holds_slot = _Worker.forks, None, None, False
        payload, overflow, is_odd, needed, reading = None, None, False, 0, Reading()
        try:
            try:
                if place is not None:
                    slot = self._slot(descriptors, *place)
                    watched = weakref.ref(slot)
            finally:
                self._connection.done()
            if error is None:
                self._mark(WHOLE_BATCH)
                self._tell_next()
                payload, overflow, is_odd, needed = self._make(task, slot, reading)
        except Exception:
            error = pickled_error(self._where)
        self._mark(NO_ROW)
        if place is not None:
            # What the dataset or collate_fn keeps of the batch keeps the slot's array alive. Then the slot may not be
            # written again, nor if a process was forked meanwhile, or if this one could not map it.
            slot = reading.batch = None
            holds_slot = watched is None or watched() is not None or _Worker.forks != forks
        work = self._clock.end(reading.collate_seconds)
        how = overflow is not None, is_odd, holds_slot, work, reading.progress
        result = Result(number, payload, error, needed, *how)
        self._connection.send(pickle.dumps(tuple(result)), [] if overflow is None else [overflow.fd])

    def _tell_next(self) -> None:
        """Tells a dataset with `read_batch` and `will_read` which samples it reads after the current batch."""
        reader = self._setup.reader
        if reader.spec is None or not hasattr(reader.dataset, "will_read"):
            return
        with suppress(EOFError):
            if received := self._connection.receive(socket.MSG_DONTWAIT):
                reader.dataset.will_read(np.asarray(pickle.loads(received[0])[1].indices, np.int64))

    def _make(
        self, task: Any, slot: np.ndarray | None, reading: Reading
    ) -> tuple[Payload, SharedMemory | None, bool, int]:
        """Returns a batch as `dump` does, and how many bytes its tensors need."""
        reader = self._setup.reader
        buffer = WorkerBuffer(slot, as_torch=reader.seed is None)
        reader.read(task, buffer, reading, self._mark)
        return *dump((reading.batch, reading.skipped), buffer), buffer.needed

    def _slot(self, descriptors: list[int], number: int, retired: list[int]) -> np.ndarray:
        """Returns the bytes, uint8 (capacity,), of a slot, and unmaps the `retired` ones.

        The descriptor of a slot's memory comes with its first task. Raises MachineFull.
        """
        for old in retired:
            self._slots.pop(old, None)
        for fd in descriptors:
            with full_machine_explained(f"providing {os.fstat(fd).st_size:,} bytes for a batch"):
                self._slots[number] = map_memory(fd, provide=True)
        if number not in self._slots:
            raise MachineFull(f"receiving a slot failed: {ADVICE[errno.EMFILE]}")
        return array_on(self._slots[number])

    def _mark(self, row: int) -> None:
        """Tells the parent what is read next. Raises Stopping, to abandon the batch, if the parent closes the pool."""
        is_stopping = self._rows[-1]
        self._rows[self._id] = NO_ROW if is_stopping else row
        if is_stopping:
            raise Stopping


def _count_fork() -> None:
    _Worker.forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)


def _reset_signals(mask: set[int]) -> None:
    """Removes the parent's Python handlers, which a forked worker would run, except those of timers.

    SIGTERM then kills the worker. SIGCHLD takes its default action: if it were ignored, the dataset could not learn
    how its programs ended. The other signals that had a handler, and SIGINT, do nothing: Ctrl-C reaches the whole
    process group, and the parent handles it. Those of timers keep their handlers: a process inherits no timer, so only
    the dataset can have set one, to limit the time for a sample.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if (callable(signal.getsignal(number)) and number not in OF_TIMERS) or number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL if number in TAKES_DEFAULT else _do_nothing)
            signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _do_nothing(number: int, frame: object) -> None:
    """Handles a signal. A program that the dataset starts would inherit SIG_IGN, but no handler."""


def _set_up(setup: Setup, worker_id: int) -> None:
    torch.set_num_threads(1)
    seed = setup.base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(setup.base_seed, worker_id))
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=setup.num_workers, seed=seed, dataset=setup.reader.dataset
    )
    if setup.init_fn is not None:
        setup.init_fn(worker_id)


def die_with_parent(fd: int) -> None:
    """Has the kernel kill this process when the parent has exited, even while C code holds the interpreter's lock.

    fd: a pipe whose other end nobody but the parent has; it stays open.
    """
    import fcntl  # Windows has none

    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC)
    except OSError:  # a sandbox that forbids it
        threading.Thread(target=lambda: (os.read(fd, 1), os._exit(1)), daemon=True).start()
    poll = select.poll()
    poll.register(fd)
    if poll.poll(0):  # it had exited before
        os._exit(1)
