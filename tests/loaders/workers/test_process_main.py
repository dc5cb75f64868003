"""What a worker process does, here in a thread that has the other end of its socket."""

import os
import pickle
import random
import select
import signal
import socket
from multiprocessing.connection import wait
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from loaders import timeline
from loaders.randomness import preserved_globals
from loaders.workers import process_main
from loaders.workers.connection import Connection, Control
from loaders.workers.pool import NO_ROW, WHOLE_BATCH, Result
from loaders.workers.process_main import LEAVING, PARENT_SECONDS, READY, STOP, Setup
from loaders.workers.reader import Reader, spec_of
from loaders.workers.serialize import Payload, load
from loaders.workers.shared_memory import MachineFull, page_aligned, read_shared
from loaders.workers.slots import SlotRing
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
    ring, control, dataset = SlotRing(4, True), Control(3), Rows()
    ring.fit(4 * PAGE)
    dataset.control = control
    connections = []

    def start(init_fn=None, collate_fn=default_collate, seed=None) -> SimpleNamespace:
        ours, end = Connection.pair()
        theirs = Connection(end, blocking=True)
        connections.extend((ours, theirs))
        setup = Setup(1, 3, 70, init_fn, os.getpid(), False, set())
        reader = Reader(dataset, collate_fn, True, seed, spec_of(dataset), False)
        running = in_thread(process_main._Worker(reader, os.dup(control.fd), setup, theirs).run)

        def received() -> tuple[bytes, np.ndarray | None]:
            """The next message, and the memory that comes with it."""
            assert wait([ours], bound)
            message, fds = ours.receive()
            memory = read_shared(*fds) if fds else None
            ours.done()
            return message, memory

        def answer(number: int, task: Task, lease=None, is_new=False, retired=()) -> tuple[Result, np.ndarray | None]:
            place = None if lease is None else (lease.slot.number, list(retired))
            assert ours.send(pickle.dumps((number, task, place)), [lease.slot.memory.fd] if is_new else [])
            message, memory = received()
            return Result(*pickle.loads(message)), memory

        assert received() == (READY, None)
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
    control.close()


def opened(result: Result, slot: np.ndarray | None = None, memory: np.ndarray | None = None) -> torch.Tensor:
    """The batch of a result."""
    batch, skipped = load(Payload(*result.payload), slot, memory)
    assert skipped == []
    return batch


def task(*indices: int, **settings) -> Task:
    return Task(list(indices), None, None, **settings)


def stop(worker: SimpleNamespace, bound: float) -> None:
    worker.connection.send(STOP)
    assert worker.received() == (LEAVING, None)
    worker.running.result(bound)


class Exited(BaseException):
    """Stands in for the end of the process."""


SLEEP = ("sleep", PARENT_SECONDS)


@pytest.mark.parametrize(
    ("answer", "by_server", "parents", "calls"),
    [
        (56, False, [], [("register", 56, select.POLLIN), "poll"]),
        (ProcessLookupError(), False, [], []),
        (AttributeError(), False, [55, 55, 1], [SLEEP, SLEEP]),
        (PermissionError(), False, [55, 55, 1], [SLEEP, SLEEP]),
        (PermissionError(), False, [1], []),
        (PermissionError(), True, [7, 7, 7, 1], [SLEEP, SLEEP]),
    ],
    ids=["pidfd", "parent is gone", "old Python", "old kernel", "parent exited before it asked", "fork server"],
)
def test_a_worker_exits_as_soon_as_its_parent_has(answer, by_server, parents, calls, monkeypatch):
    called: list = []

    def pidfd_open(parent: int) -> int:
        assert parent == 55
        if isinstance(answer, Exception):
            raise answer
        return answer

    def leave(code: int) -> None:
        raise Exited(code)

    poll = SimpleNamespace(
        register=lambda *given: called.append(("register", *given)), poll=lambda: called.append("poll")
    )
    system = SimpleNamespace(
        pidfd_open=pidfd_open, getppid=iter(parents).__next__, kill=lambda parent, number: None, _exit=leave
    )
    monkeypatch.setattr(process_main, "os", system)
    monkeypatch.setattr(process_main, "select", SimpleNamespace(poll=lambda: poll, POLLIN=select.POLLIN))
    monkeypatch.setattr(process_main, "time", SimpleNamespace(sleep=lambda seconds: called.append(("sleep", seconds))))
    with pytest.raises(Exited) as exit:
        process_main._exit_with(55, by_server)
    assert exit.value.args == (1,)
    assert called == calls


def test_a_batch_is_written_into_its_slot_which_is_mapped_once(worker, bound):
    one = worker()
    leases = [one.ring.acquire(), one.ring.acquire()]
    for number, (lease, is_new) in enumerate(zip((*leases, leases[0]), (True, True, False), strict=True)):
        result, memory = one.answer(number, task(number, 5), lease, is_new)
        assert (result.number, result.error, result.needed) == (number, None, 2 * PAGE)
        assert (result.overflowed, result.holds_slot, memory) == (False, False, None)
        assert opened(result, lease.array)[:, 0].tolist() == [number, 5]
        assert (lease.array[:PAGE] == number).all()
    stop(one, bound)


def mapped(lease) -> int:
    """How often this process, which is the worker's too, has the slot's memory mapped."""
    inode = f" {os.fstat(lease.slot.memory.fd).st_ino} "
    with open("/proc/self/maps") as maps:
        return sum(inode in line for line in maps)


def test_a_retired_slot_is_unmapped(worker, bound):
    one = worker()
    old, new = one.ring.acquire(), one.ring.acquire()
    one.answer(0, task(1), old, is_new=True)
    assert mapped(old) == 2
    one.answer(1, task(1), new, is_new=True, retired=[old.slot.number])
    assert (mapped(old), mapped(new)) == (1, 2)
    stop(one, bound)


def test_a_slot_that_the_dataset_or_collate_fn_keeps_a_tensor_of_is_reported(worker, bound):
    kept: list = []

    def collate_fn(samples: list) -> torch.Tensor:
        batch = default_collate(samples)
        if batch[0, 0] == 5:
            kept.append(batch[:, :3])
        return batch

    one = worker(collate_fn=collate_fn)
    lease, other = one.ring.acquire(), one.ring.acquire()
    assert one.answer(0, task(4), lease, is_new=True)[0].holds_slot is False
    assert one.answer(1, task(5), lease)[0].holds_slot is True
    assert mapped(lease) == 2, "what was kept can still be read"
    kept.clear()
    assert mapped(lease) == 1
    assert one.answer(2, task(4), other, is_new=True)[0].holds_slot is False
    stop(one, bound)


def test_a_slot_whose_descriptor_was_lost_is_an_error_in_words(worker, bound):
    one = worker()
    result, _ = one.answer(0, task(1), one.ring.acquire())
    with pytest.raises(MachineFull, match="receiving a slot failed: too many open files"):
        pickle.loads(result.error).reraise()
    assert result.holds_slot
    stop(one, bound)


def test_a_batch_without_a_slot_comes_in_memory_of_its_own(worker, bound):
    one = worker()
    one.answer(1, task(1))  # now its clock is open, which is closed with it
    before = len(os.listdir("/proc/self/fd"))
    result, memory = one.answer(0, task(4, 5))
    assert (result.overflowed, result.needed, result.is_pickled) == (True, 2 * PAGE, False)
    assert opened(result, memory=memory)[:, 0].tolist() == [4, 5]
    stop(one, bound)
    assert len(os.listdir("/proc/self/fd")) <= before


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
    result, memory = one.answer(3, task(4, 88))
    assert (result.number, result.payload, memory) == (3, None, None)
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
    assert one.received() == (LEAVING, None)
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
