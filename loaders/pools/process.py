"""Worker processes: tasks go to each through a pipe of its own, results come back through another.

There is no shared queue, lock or feeder thread, so nothing that one worker does can hold up or damage another.
Invariant: the bytes of unanswered tasks in a worker's pipe stay below what a pipe holds, or the worker has no
unanswered task: so the parent never waits to send while a worker waits for it to receive.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import random
import select
import signal
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, reduction
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from loaders.reading import Reader, Room, Task, dump
from loaders.slots import Slot

PIPE_BYTES = 32768
JOIN_SECONDS = 1.0
HEADER = struct.Struct(
    "<q???qdd"
)  # the fields of Result before `pickled`; has_overflow says that a descriptor follows

# The parent's ends of all pipes in this process: a forked worker closes its copies, so that a pipe's end means an end.
_parents_ends: weakref.WeakSet[connection.Connection] = weakref.WeakSet()


@dataclass(slots=True)
class Result:
    """What came back for a task: a pickled batch, or a pickled ExceptionWrapper."""

    number: int
    is_error: bool
    is_pickled: bool  # not only references, but tensors
    has_overflow: bool
    needed: int  # bytes of its tensors
    busy_seconds: float
    wait_seconds: float
    pickled: bytes
    overflow_fd: int | None = None

    def close(self) -> None:
        if self.overflow_fd is not None:
            os.close(self.overflow_fd)
            self.overflow_fd = None


class WorkerFailure(RuntimeError):
    """A worker, not its dataset, is at fault: no batch was read, and none has failed."""


class WorkerDied(WorkerFailure):
    """A worker process ended without having been told to."""


class WorkerTimeout(WorkerFailure):
    """A worker took longer for its task than it may."""


class ProcessPool:
    """`num_workers` processes that read tasks; the calling thread drives it, one at a time."""

    def __init__(
        self,
        reader: Reader,
        num_workers: int,
        context: BaseContext,
        base_seed: int,
        init_fn: Callable[[int], None] | None,
        memory_fd: int,
    ) -> None:
        self._owner = os.getpid()
        self.processes: list[Any] = []
        self._tasks: list[connection.Connection] = []
        self._results: list[connection.Connection] = []
        self._unanswered: list[dict[int, int]] = [{} for _ in range(num_workers)]  # number -> bytes
        try:
            for worker_id in range(num_workers):
                setup = (worker_id, num_workers, base_seed, init_fn, os.getpid())
                self._start(context, reader, setup, memory_fd)
        except BaseException:
            self.close()
            raise
        self._workers = {result.fileno(): worker for worker, result in enumerate(self._results)}
        self._poll = select.poll()
        for fd in self._workers:
            self._poll.register(fd, select.POLLIN)

    def load(self, worker: int) -> int:
        """How many tasks the worker has not answered."""
        return len(self._unanswered[worker])

    def submit(self, worker: int, number: int, task: Task, slot: Slot | None) -> bool:
        """Sends a task, to be written into `slot`; False where the worker's pipe has no room for it now."""
        place = None if slot is None else (slot.offset, slot.capacity)
        message = pickle.dumps((number, task, place), pickle.HIGHEST_PROTOCOL)
        waiting = self._unanswered[worker]
        if waiting and sum(waiting.values()) + len(message) > PIPE_BYTES:
            return False
        try:
            self._tasks[worker].send_bytes(message)
        except OSError as error:
            raise self._died(worker) from error
        waiting[number] = len(message)
        return True

    def receive(self, timeout: float | None) -> list[Result]:
        """Waits until a result is there, at most `timeout` seconds (None: for ever). Raises WorkerDied."""
        milliseconds = None if timeout is None else max(0, timeout * 1000)
        received = []
        for fd, _ in self._poll.poll(milliseconds):
            worker = self._workers[fd]
            try:
                while True:
                    result = self._receive_one(self._results[worker])
                    received.append(result)
                    del self._unanswered[worker][result.number]
                    if not self._results[worker].poll():
                        break
            except (EOFError, OSError) as error:
                if not received:
                    raise self._died(worker) from error
        return received

    def _receive_one(self, results: connection.Connection) -> Result:
        message = results.recv_bytes()
        result = Result(*HEADER.unpack_from(message), message[HEADER.size :])
        if result.has_overflow:
            result.overflow_fd = reduction.recv_handle(results)
        return result

    def close(self) -> None:
        """Ends the workers: asked to, those that are idle leave at once; the others are killed. All are reaped."""
        for tasks in self._tasks:
            with suppress(OSError):
                tasks.send_bytes(b"")
            tasks.close()
        deadline = time.monotonic() + JOIN_SECONDS
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
        for results in self._results:  # after the workers, whose end is what wakes a thread that waits here
            results.close()
        self._tasks, self._results = [], []

    def __del__(self) -> None:
        if os.getpid() == self._owner:  # not in a forked child that has inherited the object
            self.close()

    def _start(self, context: BaseContext, reader: Reader, setup: tuple[Any, ...], memory_fd: int) -> None:
        theirs_tasks, tasks = context.Pipe(duplex=False)
        results, theirs_results = context.Pipe(duplex=True)  # a socket, which can carry descriptors
        _parents_ends.update((tasks, results))
        self._tasks.append(tasks)
        self._results.append(results)
        carried = reader if context.get_start_method() == "fork" else _Carried(reader, memory_fd)
        process = context.Process(
            target=_work, args=(carried, memory_fd, setup, theirs_tasks, theirs_results), daemon=True
        )
        process.start()
        self.processes.append(process)
        theirs_tasks.close()
        theirs_results.close()

    def _died(self, worker: int) -> WorkerDied:
        process = self.processes[worker]
        process.join(JOIN_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            reason = f"is killed by signal: {signal.strsignal(-code)}."
        else:
            reason = f"exited unexpectedly with exit code {code}."
        return WorkerDied(f"DataLoader worker (pid {process.pid}) {reason}")


class _Carried:
    """What a worker that is not forked is given, pickled so that large arrays go over as shared memory, not as copies.

    Must be pickled by Process.start(): only then can descriptors be sent along. (Tensors are shared by torch itself.)
    """

    LARGE = 1 << 20  # bytes

    def __init__(self, reader: Reader, memory_fd: int) -> None:
        self.reader, self.memory_fd = reader, memory_fd

    def __reduce__(self) -> Any:
        buffer = io.BytesIO()
        pickler = reduction.ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {**pickler.dispatch_table, np.ndarray: _share_array}
        try:
            pickler.dump(self.reader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _name_unpicklable(self.reader, error) from error
        return _arrive, (buffer.getvalue(), reduction.DupFd(self.memory_fd))


def _arrive(pickled: bytes, memory: Any) -> tuple[Reader, int]:
    return pickle.loads(pickled), memory.detach()


def _share_array(array: np.ndarray) -> Any:
    if array.nbytes < _Carried.LARGE or array.dtype.hasobject or type(array) is not np.ndarray:
        return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    fd = os.memfd_create("loader-dataset", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, array.nbytes)
    with mmap.mmap(fd, array.nbytes) as memory:
        np.frombuffer(memory, array.dtype)[:] = array.reshape(-1)
    return _rebuild_array, (reduction.DupFd(fd), array.dtype, array.shape)


def _rebuild_array(memory: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    fd = memory.detach()
    array = np.frombuffer(mmap.mmap(fd, 0), dtype).reshape(shape)
    os.close(fd)
    return array


def _name_unpicklable(reader: Reader, error: Exception) -> TypeError:
    """Says which attribute of the dataset, or which other argument, stands in the way."""
    parts = {f"dataset.{name}": value for name, value in getattr(reader.dataset, "__dict__", {}).items()}
    for name, part in {**parts, "dataset": reader.dataset, "collate_fn": reader.collate_fn}.items():
        try:
            reduction.ForkingPickler.dumps(part)
        except Exception as cause:
            return TypeError(
                f"{name} ({part!r}) cannot be pickled, and workers that are not forked need that: make it a "
                f"module-level function or class, or use multiprocessing_context='fork' ({cause})"
            )
    return TypeError(f"the dataset cannot be pickled, and workers that are not forked need that: {error}")


class _Inbox:
    """A worker's tasks, until the parent says stop or is gone, whoever else holds the other end of the pipe."""

    def __init__(self, tasks: connection.Connection, parent: int) -> None:
        self._tasks = tasks
        self._poll = select.poll()
        self._poll.register(tasks.fileno(), select.POLLIN)
        self._parent = os.pidfd_open(parent)
        self._poll.register(self._parent, select.POLLIN)

    def get(self) -> bytes | None:
        ready = [fd for fd, _ in self._poll.poll()]
        if self._parent in ready:
            return None
        return self._tasks.recv_bytes() or None


class _Mapper:
    """The ring's slots as this worker has mapped them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._slots: dict[int, Slot] = {}

    def room(self, place: tuple[int, int] | None) -> Room:
        if place is None:
            return Room(None)
        offset, capacity = place
        if offset not in self._slots:
            self._slots[offset] = Slot.for_writing(self._fd, offset, capacity)
        return Room(self._slots[offset].array())


def _work(reader: Reader | tuple[Reader, int], memory_fd: int, setup: Any, tasks: Any, results: Any) -> None:
    """The worker process: answers tasks until it is told to stop or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends its workers
    for end in list(_parents_ends):
        end.close()
    if isinstance(reader, tuple):
        reader, memory_fd = reader
    worker_id, num_workers, base_seed, init_fn, parent = setup
    torch.set_num_threads(1)
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(base_seed, worker_id))
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=num_workers, seed=seed, dataset=reader.dataset
    )
    where = f"in DataLoader worker process {worker_id}"
    failed_start = None
    try:
        if init_fn is not None:
            init_fn(worker_id)
    except Exception:
        failed_start = _dump_error(where)

    mapper, inbox = _Mapper(memory_fd), _Inbox(tasks, parent)
    try:
        waited_from = time.perf_counter()
        while (message := inbox.get()) is not None:
            began = time.perf_counter()
            number, task, place = pickle.loads(message)
            room = Room(None)
            is_error, answer = True, failed_start
            if failed_start is None:
                try:
                    room = mapper.room(place)
                    is_error, answer = False, dump(reader.read(task, room), room)
                except Exception:
                    is_error, answer = True, _dump_error(where)
            ended = time.perf_counter()
            overflows = room.overflow_fd is not None and not is_error
            header = (number, is_error, room.is_pickled, overflows, room.needed, ended - began, began - waited_from)
            results.send_bytes(HEADER.pack(*header) + answer)
            if overflows:
                reduction.send_handle(results, room.overflow_fd, parent)
            room.close()
            waited_from = ended
    except (BrokenPipeError, ConnectionResetError, EOFError):
        pass  # the parent has closed the pool, or is gone


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
