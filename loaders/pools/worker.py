"""A worker process: answers tasks until it is told to stop or its parent is gone."""

from __future__ import annotations

import gc
import os
import pickle
import random
import select
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, reduction
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from loaders.pools.results import WHOLE
from loaders.reading import Reader
from loaders.slots import Slot, map_marks
from loaders.transfer import SharedRoom, dump

HELLO = -1  # the number of the answers that say that a worker has started, and that it is set up
HEADER = struct.Struct("<q???qdd")  # see loaders.pools.process.Answer

# The parent's ends of all pipes in this process: a forked worker closes its copies, so that a pipe's end means an end.
parents_ends: weakref.WeakSet[connection.Connection] = weakref.WeakSet()


@dataclass
class Setup:
    """What a worker is told at its start."""

    worker_id: int
    num_workers: int
    base_seed: int
    init_fn: Callable[[int], None] | None
    parent: int  # its process id


def work(reader: Any, memory_fd: int, setup: Setup, tasks: Any, results: Any) -> None:
    """The process's main function; `reader` is a Reader, or (Reader, memory_fd) where they were carried."""
    gc.freeze()  # the collector would write to what a forked worker shares with its parent, and so copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for end in list(parents_ends):
        end.close()
    hello = HEADER.pack(HELLO, False, False, False, 0, 0.0, 0.0)
    results.send_bytes(hello)
    if isinstance(reader, tuple):
        reader, memory_fd = reader
    threading.Thread(target=_leave_with, args=(setup.parent,), daemon=True).start()
    where = f"in DataLoader worker process {setup.worker_id}"
    failed_start = None
    try:
        _set_up(setup, reader)
    except Exception:
        failed_start = _dump_error(where)
    results.send_bytes(hello)
    mapper = _Mapper(memory_fd)
    mark = partial(map_marks(memory_fd, setup.num_workers).__setitem__, setup.worker_id)
    try:
        waited_from = time.perf_counter()
        while message := tasks.recv_bytes():
            began = time.perf_counter()
            number, task, place = pickle.loads(message)
            room = SharedRoom()
            is_error, answer = True, failed_start
            if failed_start is None:
                try:
                    room = mapper.room(place)
                    mark(WHOLE)
                    is_error, answer = False, dump(reader.read(task, room, mark), room)
                except Exception:
                    is_error, answer = True, _dump_error(where)
                mark(-1)
            ended = time.perf_counter()
            overflowed = room.overflow_fd is not None and not is_error
            header = (number, is_error, room.is_pickled, overflowed, room.needed, ended - began, began - waited_from)
            results.send_bytes(HEADER.pack(*header) + answer)
            if overflowed:
                reduction.send_handle(results, room.overflow_fd, setup.parent)
            room.close()
            waited_from = ended
    except (BrokenPipeError, ConnectionResetError, EOFError):
        pass  # the parent has closed the pool, or is gone


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


def _leave_with(parent: int) -> None:
    """Ends this process as soon as its parent has, whoever else holds the pipes, and whatever it is reading."""
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    os._exit(1)


class _Mapper:
    """The ring's slots as this worker has mapped them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._slots: dict[int, Slot] = {}

    def room(self, place: tuple[int, int] | None) -> SharedRoom:
        if place is None:
            return SharedRoom()
        offset, capacity = place
        if offset not in self._slots:
            self._slots[offset] = Slot.for_writing(self._fd, offset, capacity)
        return SharedRoom(torch.from_numpy(self._slots[offset].array()))


def _dump_error(where: str) -> bytes:
    """The exception being handled, with its traceback, for the parent to raise."""
    wrapper = ExceptionWrapper(where=where)
    try:
        pickled = pickle.dumps(wrapper)
        pickle.loads(pickled)
        return pickled
    except Exception:  # a class that only this process knows
        wrapper.exc_type = RuntimeError
        return pickle.dumps(wrapper)
