"""What a worker process runs: it answers tasks until it is told to stop, or its parent has exited."""

from __future__ import annotations

import gc
import os
import pickle
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from ..timeline import WorkClock
from .batch_buffer import SharedBatchBuffer, stacks_as_torch_does
from .connection import Connection
from .pool import NO_ROW, WHOLE_BATCH, Result
from .reader import Reader, Stopping
from .serialize import dump
from .shared_memory import Mapping, full_machine_explained
from .slots import Control

# The messages that are not tasks or results. Those are pickles, which begin with another byte.
STARTED, READY, LEAVING, STOP = b"started", b"ready", b"leaving", b"stop"
PARENT_SECONDS = 0.5  # how often a worker checks that its parent is alive, where the system has no pidfd


@dataclass
class Setup:
    """The settings of a worker process."""

    worker_id: int
    num_workers: int
    base_seed: int
    init_fn: Callable[[int], None] | None
    parent: int  # the process that the loader runs in
    signal_mask: set[int]  # of the thread that started the worker


def work(reader: Any, memory_fd: int, setup: Setup, end: socket.socket) -> None:
    """Runs a worker process. If it was not forked, `reader` is a pair (Reader, memory_fd): see SpawnedReader."""
    gc.freeze()  # else the collector would write to memory that is shared with the parent, which copies it
    _reset_signals(setup.signal_mask)
    connection = Connection(end, blocking=True)
    connection.send(STARTED)
    if isinstance(reader, tuple):
        reader, memory_fd = reader
    threading.Thread(target=_exit_with, args=(setup.parent,), daemon=True).start()
    with suppress(OSError, EOFError):  # the parent has closed the pool, or has exited
        _Worker(reader, memory_fd, setup, connection).run()


class _Worker:
    def __init__(self, reader: Reader, memory_fd: int, setup: Setup, connection: Connection) -> None:
        self._reader, self._setup, self._connection = reader, setup, connection
        self._where = f"in DataLoader worker process {setup.worker_id}"
        self._slots = _MappedSlots(memory_fd)
        self._control = Control(memory_fd, setup.num_workers)

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
            try:
                number, task, place = pickle.loads(received[0])
                self._answer(number, task, place, failed_setup)
            except Stopping:
                break
        self._connection.send(LEAVING)

    def _answer(self, number: int, task: Any, place: tuple[int, int, int] | None, error: bytes | None) -> None:
        self._clock.begin()
        buffer, payload, reading = SharedBatchBuffer(), None, None
        if error is None:
            try:
                buffer = SharedBatchBuffer(self._slots.array(place))
                self._mark(WHOLE_BATCH)
                with _stacking_into(buffer):
                    reading = self._reader.read(task, buffer, self._mark)
                    payload = dump((reading.batch, reading.skipped), buffer)
            except Exception:
                error = _pickled_error(self._where)
            self._mark(NO_ROW)
        work = self._clock.end(reading.collate_seconds if reading else 0.0)
        descriptors = [] if buffer.overflow_fd is None or error is not None else [buffer.overflow_fd]
        flags = buffer.needed, bool(descriptors), buffer.is_pickled
        result = Result(number, payload, error, *flags, work)
        self._connection.send(pickle.dumps(tuple(result)), descriptors)
        buffer.close()

    def _mark(self, row: int) -> None:
        """Tells the parent what is read next. Raises Stopping, to abandon the batch, if the parent closes the pool."""
        if self._control.is_stopping:
            raise Stopping
        self._control.rows[self._setup.worker_id] = row


class _MappedSlots:
    """Maps slots into this process. When the parent has replaced a slot, the old one is unmapped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mapped: dict[int, tuple[int, Mapping]] = {}  # number -> offset, mapping

    def array(self, place: tuple[int, int, int] | None) -> np.ndarray | None:
        """Returns the bytes, uint8 (capacity,), of the slot at `place` (see Slot). Raises MachineFull."""
        if place is None:
            return None
        number, offset, capacity = place
        if self._mapped.get(number, (-1,))[0] != offset:
            self._mapped.pop(number, None)
            with full_machine_explained(f"providing {capacity:,} bytes for a batch"):
                self._mapped[number] = offset, Mapping(self._fd, offset, capacity, provide=True)
        return self._mapped[number][1].array()


@contextmanager
def _stacking_into(buffer: SharedBatchBuffer) -> Iterator[None]:
    """Makes default_collate, if the user's collate_fn calls it, stack into the buffer instead of /dev/shm."""
    if not stacks_as_torch_does():
        yield
        return
    default_collate_fn_map[torch.Tensor] = buffer.stack
    try:
        yield
    finally:
        default_collate_fn_map[torch.Tensor] = collate_tensor_fn


def _reset_signals(mask: set[int]) -> None:
    """Removes the parent's Python handlers, which a forked worker would run.

    SIGTERM then kills the worker. The other signals that had a handler, and SIGINT, are ignored: Ctrl-C reaches the
    whole process group, and the parent handles it.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
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


def _exit_with(parent: int) -> None:
    """Exits when the parent has exited, even while a sample is read, or while a sibling keeps the socket open."""
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # an old Python or kernel, or a sandbox that forbids it
        starter = os.getppid()  # the parent, or the fork server that started this process: it exits with the parent
        while os.getppid() == starter:
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
