"""What a worker process does, here in a thread that has the other end of its socket."""

import os
import pickle
import random
import select
import signal
import socket
from multiprocessing.connection import wait
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from loaders import timeline
from loaders.randomness import preserved_globals
from loaders.workers import process_main
from loaders.workers.batch_buffer import SharedBatchBuffer
from loaders.workers.connection import Connection
from loaders.workers.pool import NO_ROW, WHOLE_BATCH, Result
from loaders.workers.process_main import LEAVING, PARENT_SECONDS, READY, STARTED, STOP, Setup
from loaders.workers.reader import Reader, spec_of
from loaders.workers.serialize import load
from loaders.workers.shared_memory import Mapping, page_aligned, read_shared
from loaders.workers.slots import Control, SlotRing
from loaders.workers.tasks import Task

PAGE = page_aligned(1)


class TwoArguments(Exception):
    def __init__(self, one: int, two: int) -> None:  # it cannot be made anew from its message
        super().__init__("two arguments")


class Rows:
    """Sample i is a page of i; notes what the parent sees of the row that is read."""

    def __init__(self) -> None:
        self.control: Control | None = None
        self.rows: list[int] = []
        self.hidden: dict = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        self.rows.append(int(self.control.rows[1]))
        if index == 77:
            self.control.stop()
        if index == 88:
            raise ValueError("88 is bad")
        if index == 99:
            raise TwoArguments(1, 2)
        if index == 66:
            raise type("Local", (Exception,), {})("a class without a name cannot be pickled")
        return torch.full((PAGE,), index, dtype=torch.uint8)


@pytest.fixture
def worker(in_thread, bound):
    """A worker of a pool of 3, number 1."""
    ring, dataset = SlotRing(4, 3), Rows()
    ring.fit(4 * PAGE)
    dataset.control = Control(ring.fd, 3)
    connections = []

    def start(init_fn=None, collate_fn=default_collate, seed=None) -> SimpleNamespace:
        ours, end = Connection.pair()
        theirs = Connection(end, blocking=True)
        connections.extend((ours, theirs))
        setup = Setup(1, 3, 70, init_fn, os.getpid(), set())
        reader = Reader(dataset, collate_fn, True, seed, spec_of(dataset), False)
        running = in_thread(process_main._Worker(reader, ring.fd, setup, theirs).run)

        def received() -> tuple[bytes, list[int]]:
            assert wait([ours], bound)
            message = ours.receive()
            assert message is not None
            return message

        def answer(number: int, task: Task, place=None) -> tuple[Result, list[int]]:
            assert ours.send(pickle.dumps((number, task, place)))
            message, fds = received()
            return Result(*pickle.loads(message)), fds

        assert received() == (READY, [])
        return SimpleNamespace(
            connection=ours, answer=answer, received=received, running=running, ring=ring, dataset=dataset
        )

    threads, info = torch.get_num_threads(), torch_worker._worker_info
    torch.set_num_threads(4)
    with preserved_globals():
        yield start
        for connection in connections:
            connection.close()
    torch.set_num_threads(threads)
    torch_worker._worker_info = info
    ring.close()


def task(*indices: int, **settings) -> Task:
    return Task(list(indices), None, None, **settings)


def stop(worker: SimpleNamespace, bound: float) -> None:
    worker.connection.send(STOP)
    assert worker.received() == (LEAVING, [])
    worker.running.result(bound)


@pytest.fixture
def started(monkeypatch, in_thread, bound):
    """Runs `work` without what would change this process; returns what it called, by name."""
    calls, watched = {}, SimpleQueue()
    ours, end = Connection.pair()
    monkeypatch.setattr(process_main, "gc", SimpleNamespace(freeze=lambda: calls.update(frozen=True)))
    monkeypatch.setattr(process_main, "_reset_signals", lambda mask: calls.update(mask=mask))
    monkeypatch.setattr(process_main, "_exit_with", watched.put)

    def start(reader, run) -> dict:
        monkeypatch.setattr(
            process_main, "_Worker", lambda *given: calls.update(given=given) or SimpleNamespace(run=run)
        )
        setup = Setup(1, 3, 70, None, 1234, {signal.SIGUSR2})
        in_thread(process_main.work, reader, 7, setup, end).result(bound)
        assert ours.receive() == (STARTED, [])
        return {**calls, "parent": watched.get(timeout=bound), "blocks": end.getblocking()}

    yield start
    ours.close()
    end.close()


@pytest.mark.parametrize(("reader", "memory_fd"), [("reader", 7), (("reader", 8), 8)], ids=["forked", "spawned"])
def test_a_worker_says_that_it_has_started_and_watches_its_parent(started, reader, memory_fd):
    runs = []
    calls = started(reader, lambda: runs.append("ran"))
    assert calls.pop("given")[:2] == ("reader", memory_fd)
    assert calls == {"frozen": True, "mask": {signal.SIGUSR2}, "parent": 1234, "blocks": True}
    assert runs == ["ran"]


@pytest.mark.parametrize("error", [OSError(), EOFError()], ids=["OSError", "EOFError"])
def test_a_worker_whose_parent_is_gone_exits_quietly(started, error):
    def run() -> None:
        raise error

    started("reader", run)


class Exited(BaseException):
    """Stands in for the end of the process."""


@pytest.mark.parametrize(
    ("opened", "waits"),
    [
        (lambda parent: parent + 1, [("register", 56, select.POLLIN), "poll"]),
        (ProcessLookupError(), []),
        (AttributeError(), [("sleep", PARENT_SECONDS)] * 2),
        (PermissionError(), [("sleep", PARENT_SECONDS)] * 2),
    ],
    ids=["pidfd", "parent is gone", "old Python", "old kernel"],
)
def test_a_worker_exits_as_soon_as_its_parent_has(opened, waits, monkeypatch):
    calls: list = []
    parents = iter([5, 5, 5, 9])

    def pidfd_open(parent: int) -> int:
        if isinstance(opened, Exception):
            raise opened
        return opened(parent)

    def leave(code: int) -> None:
        raise Exited(code)

    poll = SimpleNamespace(
        register=lambda *given: calls.append(("register", *given)), poll=lambda: calls.append("poll")
    )
    system = SimpleNamespace(pidfd_open=pidfd_open, getppid=lambda: next(parents), _exit=leave)
    monkeypatch.setattr(process_main, "os", system)
    monkeypatch.setattr(process_main, "select", SimpleNamespace(poll=lambda: poll, POLLIN=select.POLLIN))
    monkeypatch.setattr(process_main, "time", SimpleNamespace(sleep=lambda seconds: calls.append(("sleep", seconds))))
    with pytest.raises(Exited) as exit:
        process_main._exit_with(55)
    assert exit.value.args == (1,)
    assert calls == waits


def test_a_batch_is_written_into_its_slot_which_is_mapped_once(worker, bound):
    one = worker()
    leases = [one.ring.acquire(), one.ring.acquire()]
    for number, lease in enumerate((*leases, leases[0])):
        result, fds = one.answer(number, task(number, 5), lease.place)
        assert (result.number, result.error, result.needed) == (number, None, 2 * PAGE)
        assert (result.overflowed, fds) == (False, [])
        batch, skipped = load(result.payload, lease.array, None, result.needed)
        assert batch[:, 0].tolist() == [number, 5]
        assert (lease.array[:PAGE] == number).all()
        assert skipped == []
    stop(one, bound)


def test_a_slot_is_mapped_with_its_memory_once_until_another_replaces_it(worker, bound, monkeypatch):
    mapped: list = []

    def mapping(fd: int, offset: int, size: int, **how) -> Mapping:
        mapped.append((offset, size, how))
        return Mapping(fd, offset, size, **how)

    monkeypatch.setattr(process_main, "Mapping", mapping)
    one = worker()
    first = one.ring.acquire()
    number, offset, size = first.place
    os.ftruncate(one.ring.fd, offset + 2 * size)
    for place in (first.place, first.place, (number, offset + size, size)):
        result, _ = one.answer(0, task(len(mapped)), place)
        assert result.error is None
    assert mapped == [(offset, size, {"provide": True}), (offset + size, size, {"provide": True})]
    assert first.array[0] == 1  # the third batch lies in the other slot
    stop(one, bound)


def test_a_batch_without_a_slot_comes_in_memory_of_its_own(worker, bound):
    one = worker()
    os.close(one.answer(1, task(1))[1][0])  # now its clock is open, which is closed with it
    before = len(os.listdir("/proc/self/fd"))
    result, (fd,) = one.answer(0, task(4, 5))
    assert (result.overflowed, result.needed, result.is_pickled) == (True, 2 * PAGE, False)
    batch, _ = load(result.payload, None, read_shared(fd), result.needed)
    assert batch[:, 0].tolist() == [4, 5]
    stop(one, bound)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_collate_fn_that_calls_torchs_stacks_into_the_slot_too(worker, bound):
    stacks: list = []

    def collate_fn(samples: list) -> dict:
        stacks.append(default_collate_fn_map[torch.Tensor])
        return {"image": default_collate(samples)}

    one = worker(collate_fn=collate_fn)
    lease = one.ring.acquire()
    result, _ = one.answer(0, task(4, 5), lease.place)
    assert result.needed == 2 * PAGE
    assert lease.array[0] == 4
    assert stacks[0] is not collate_tensor_fn
    assert default_collate_fn_map[torch.Tensor] is collate_tensor_fn
    stop(one, bound)


def test_the_parent_sees_which_row_is_read(worker, bound):
    one = worker()
    one.answer(0, task(4, 5, singly=True))
    assert one.dataset.rows == [0, 1]
    assert one.dataset.control.rows[:4].tolist() == [0, NO_ROW, 0, 0]
    one.dataset.__class__.__getitems__ = lambda self, indices: [self[index] for index in indices]
    try:
        one.answer(1, task(6))
    finally:
        del one.dataset.__class__.__getitems__
    assert one.dataset.rows == [0, 1, WHOLE_BATCH]
    stop(one, bound)


def test_an_error_comes_with_the_workers_traceback_and_its_number(worker, bound):
    one = worker()
    result, fds = one.answer(3, task(4, 88))
    assert (result.number, result.payload, fds) == (3, None, [])
    with pytest.raises(ValueError, match=r"(?s)in DataLoader worker process 1.*88 is bad"):
        pickle.loads(result.error).reraise()
    for index, name in ((99, "TwoArguments"), (66, "Local")):
        result, _ = one.answer(4, task(index))
        with pytest.raises(RuntimeError, match=f"(?s)in DataLoader worker process 1.*{name}"):
            pickle.loads(result.error).reraise()
    assert one.answer(5, task(4))[0].error is None
    stop(one, bound)


def test_a_failed_worker_init_fn_is_the_error_of_every_task(worker, bound):
    def init_fn(worker_id: int) -> None:
        raise ValueError(f"no setup for {worker_id}")

    one = worker(init_fn)
    for number in (0, 1):
        result, _ = one.answer(number, task(4))
        with pytest.raises(ValueError, match="no setup for 1"):
            pickle.loads(result.error).reraise()
    assert one.dataset.rows == []
    stop(one, bound)


def test_the_process_is_set_up_as_torchs_workers_are(worker, bound):
    seen = []

    def init_fn(worker_id: int) -> None:
        info = get_worker_info()
        draws = random.random(), torch.rand(()).item(), np.random.random()
        seen.append((worker_id, info.id, info.num_workers, info.seed, info.dataset, torch.get_num_threads(), draws))

    one = worker(init_fn)
    stop(one, bound)
    random.seed(71)
    torch.manual_seed(71)
    np.random.seed(torch_worker._generate_state(70, 1))
    draws = random.random(), torch.rand(()).item(), np.random.random()
    assert seen == [(1, 1, 3, 71, one.dataset, 1, draws)]


def test_a_batch_is_abandoned_when_the_pool_is_closed(worker, bound):
    one = worker()
    one.connection.send(pickle.dumps((0, task(1, 77, 2), None)))
    assert one.received() == (LEAVING, [])
    one.running.result(bound)
    assert len(one.dataset.rows) == 2


def test_seconds_of_reading_and_waiting_are_counted(worker, bound, monkeypatch):
    ticks = iter(range(100))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), thread_time=lambda: 0.0)
    monkeypatch.setattr(timeline, "time", clock)
    one = worker()
    results = [one.answer(number, task(1))[0] for number in range(2)]
    assert [(result.work.seconds, result.work.wait_seconds) for result in results] == [(1.0, 1.0), (1.0, 1.0)]
    stop(one, bound)


def test_a_forked_workers_handlers_are_reset_and_its_mask_is_its_parents():
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    wakeup = signal.set_wakeup_fd(ours.fileno())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    try:
        signal.signal(signal.SIGUSR1, print)
        signal.signal(signal.SIGTERM, print)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        process_main._reset_signals({signal.SIGUSR2})
        assert signal.getsignal(signal.SIGUSR1) == signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == {signal.SIGUSR2}
    finally:
        signal.set_wakeup_fd(wakeup)
        for one in (ours, theirs):
            one.close()
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_where_a_user_replaced_torchs_stacking_it_is_left_alone(monkeypatch):
    own = lambda samples, **_: samples  # noqa: E731
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, own)
    with process_main._stacking_into(SharedBatchBuffer()):
        assert default_collate_fn_map[torch.Tensor] is own
