"""The main process's side of worker processes: the workers do what a test's script says, and the clock is the test's.

Their sockets are real, so what they send arrives as it does from processes; no process is started.
"""

import errno
import os
import pickle
import select
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate

from loaders.workers import process_pool, worker_process
from loaders.workers.batch_buffer import WorkerBuffer
from loaders.workers.connection import Connection
from loaders.workers.pool import NO_ROW, Death, PoolClosed, Result
from loaders.workers.process_main import READY, STARTED
from loaders.workers.process_pool import LONGEST_SECONDS, LOOK_SECONDS, SETUP_FACTOR, START_SECONDS, ProcessPool
from loaders.workers.reader import Reader
from loaders.workers.serialize import dump
from loaders.workers.shared_memory import MachineFull, write_shared
from loaders.workers.slots import Lease, Slot
from loaders.workers.tasks import Task
from loaders.workers.worker_process import BUSY_SECONDS, WorkerProcess

START = START_SECONDS["fork"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Poll:
    """A poll that does not wait: if nothing is ready the clock goes on to the end of the waiting."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.real = clock, select.poll()
        self.register, self.unregister = self.real.register, self.real.unregister
        self.waits: list[float | None] = []

    def poll(self, milliseconds: float | None) -> list:
        self.waits.append(milliseconds)
        ready = self.real.poll(0)
        if not ready:
            assert milliseconds is not None, "the pool waits for ever"
            self.clock.now += milliseconds / 1000
        return ready


class Process:
    """Dies when it is told to; its sentinel is readable then, unless a child of it holds that open."""

    def __init__(self) -> None:
        self.pid, self.exitcode = 4321, None
        self.sentinel, self.life = os.pipe()
        self.joined: list = []

    def is_alive(self) -> bool:
        return self.exitcode is None

    def die(self, exitcode: int, has_child: bool = False) -> None:
        if self.exitcode is None:
            self.exitcode = exitcode
        if self.life >= 0 and not has_child:
            os.close(self.life)
            self.life = -1

    def join(self, seconds: float | None = None) -> None:
        self.joined.append((seconds, self.exitcode))


class Worker(WorkerProcess):
    """`theirs` is the worker's end of the socket."""

    has_pidfd = True
    made: list["Worker"]

    def start(self, reader, control_fd: int, setup) -> None:
        self.made.append(self)
        self.given = reader, control_fd, setup
        self.process = Process()
        self.pidfd = os.dup(self.process.sentinel) if self.has_pidfd else -1
        self.theirs = Connection(self._end, blocking=False)
        self.is_closed = False

    def kill(self) -> None:
        self.process.die(-signal.SIGKILL)

    def close(self) -> None:
        if self.process is not None:
            self.kill()
            os.close(self.process.sentinel)
            self.process.sentinel = -1
        self.connection.close()
        self._end.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.is_closed = True

    # What a test scripts.

    def says(self, *messages: bytes) -> None:
        for message in messages:
            assert self.theirs.send(message)

    def answers(self, number: int, payload: bytes | None = b"batch", fds=(), **fields) -> None:
        assert self.theirs.send(pickle.dumps(tuple(Result(number, payload, **fields))), fds)

    def received(self) -> list:
        messages = []
        while (message := self.theirs.receive()) is not None:
            messages.append(message[0])
            self.theirs.done()
        return messages


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(process_pool, "time", clock)
    monkeypatch.setattr(worker_process, "time", clock)
    return clock


@pytest.fixture
def polls(monkeypatch, clock):
    made: list[Poll] = []
    fake = SimpleNamespace(poll=lambda: made.append(Poll(clock)) or made[-1], POLLIN=select.POLLIN)
    monkeypatch.setattr(process_pool, "select", fake)
    return made


@pytest.fixture
def exits(monkeypatch):
    """The calls of wait_for_exit: (workers, deadline)."""
    calls: list = []
    monkeypatch.setattr(process_pool, "wait_for_exit", lambda *given: calls.append(given))
    return calls


@pytest.fixture
def make(monkeypatch, clock, polls, exits):
    monkeypatch.setattr(process_pool, "WorkerProcess", Worker)
    monkeypatch.setattr(Worker, "made", [], raising=False)
    pools = []

    def make(num_workers: int = 1, timeout: float = 0, init_fn=None, method: str = "fork") -> ProcessPool:
        reader = Reader([1, 2, 3], default_collate, True, None, None, False)
        context = SimpleNamespace(get_start_method=lambda: method)
        pools.append(ProcessPool(reader, num_workers, context, 70, init_fn, timeout, num_workers))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def task(*indices: int, **settings) -> Task:
    return Task(list(indices), **settings)


def ready(pool: ProcessPool, seconds: float = 0) -> Worker:
    """The newest worker, after a set-up of so many seconds."""
    worker = Worker.made[-1]
    worker.says(STARTED)
    pool._wait_and_receive()
    pool_clock = process_pool.time
    pool_clock.now += seconds
    worker.says(READY)
    pool._wait_and_receive()
    return worker


def received(pool: ProcessPool) -> list:
    """What the pool reports next."""
    pool.wait()
    events = [*pool.events]
    pool.events.clear()
    return events


def death(pool: ProcessPool) -> Death:
    (event,) = received(pool)
    assert isinstance(event, Death)
    return event


# Starting


def test_each_worker_is_told_its_number_and_is_a_process_of_the_pool(make):
    pool = make(2, init_fn=print)
    setups = [worker.given[2] for worker in Worker.made]
    assert [(setup.worker_id, setup.num_workers, setup.base_seed) for setup in setups] == [(0, 2, 70), (1, 2, 70)]
    assert all((setup.init_fn, setup.parent) == (print, os.getpid()) for setup in setups)
    assert pool.processes == [worker.process for worker in Worker.made]
    assert (pool.num_workers, pool.writes_to_slots) == (2, True)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_worker_that_says_nothing_is_killed_after_the_time_of_its_start_method(make, clock, polls, method):
    pool = make(method=method)
    event = death(pool)
    assert event.reason == f"DataLoader worker (pid 4321) did not start in {START_SECONDS[method]:g} s."
    assert (event.worker, event.row) == (0, NO_ROW)
    assert polls[0].waits == [pytest.approx(1000 * START_SECONDS[method])]
    assert Worker.made[0].is_closed


def test_the_first_set_up_of_a_worker_has_no_limit(make):
    pool = make(timeout=1)
    Worker.made[0].says(STARTED)
    pool._wait_and_receive()
    with pytest.raises(AssertionError, match="waits for ever"):
        pool.wait()


@pytest.mark.parametrize("set_ups", [(7.0, 2.0), (2.0, 7.0), (0.25,)])
def test_a_later_set_up_is_limited_by_the_longest_so_far(make, clock, set_ups):
    pool, longest = make(), max(set_ups)
    for seconds in set_ups:
        ready(pool, seconds).process.die(1)
        death(pool)
        pool.submit(0, 0, task(1), None, [])
    Worker.made[-1].says(STARTED)
    began = clock.now
    event = death(pool)
    assert event.reason.endswith(f"did not start in {START + longest * SETUP_FACTOR:g} s.")
    assert clock.now == began + START + longest * SETUP_FACTOR


def test_a_worker_that_cannot_start_is_an_error_that_tells_which_and_ends_the_others(make, exits, monkeypatch):
    start = Worker.start

    def refuse(worker: Worker, *given) -> None:
        if Worker.made:
            raise OSError(errno.EMFILE, "no descriptors")
        start(worker, *given)

    monkeypatch.setattr(Worker, "start", refuse)
    with pytest.raises(MachineFull, match="starting worker 2 of 3 failed"):
        make(3)
    ((workers, _),) = exits
    assert workers == Worker.made
    assert Worker.made[0].is_closed


def test_a_restart_that_fails_leaves_nothing_open_and_can_be_tried_again(make, monkeypatch):
    pool = make()
    ready(pool).process.die(0)
    death(pool)
    before, failed = os.listdir("/proc/self/fd"), []

    def refuse(worker: Worker, *_) -> None:
        failed.append(worker)
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "start", refuse)
        with pytest.raises(ValueError, match="no"):
            pool.submit(0, 0, task(1), None, [])
    assert failed[0].is_closed
    assert os.listdir("/proc/self/fd") == before
    assert pool.submit(0, 0, task(1), None, [])
    assert len(Worker.made) == 2


# Tasks and results


def test_a_task_is_sent_with_the_number_of_its_slot(make):
    pool, lease = make(), Lease(None, Slot(8, np.empty(1), 1))
    assert pool.submit(0, 5, task(1, 2), lease, [])
    assert pool.submit(0, 6, task(3), None, [])
    sent = [pickle.loads(message) for message in Worker.made[0].received()]
    assert sent == [(5, task(1, 2), (8, [])), (6, task(3), None)]


def test_a_worker_whose_socket_is_full_takes_no_task(make):
    pool, count = make(), 0
    while pool.submit(0, count, task(*range(1000)), None, []):
        count += 1
    assert set(Worker.made[0].tasks) == set(range(count))


def test_results_of_all_workers_come_at_once_with_their_memory(make):
    pool = make(2)
    for number, worker in enumerate(Worker.made):
        pool.submit(number, number, task(number), None, [])
        fd = write_shared(b"more")
        worker.answers(number, needed=9, fds=[fd] if number else [])
        os.close(fd)
    before = len(os.listdir("/proc/self/fd"))
    first, second = sorted(received(pool))
    assert (first.number, first.payload, first.needed) == (0, (b"batch", None), 9)
    assert (second.number, second.payload[0]) == (1, b"batch")
    assert second.payload[1].array().tobytes() == b"more"
    assert not any(worker.tasks for worker in Worker.made)
    del second
    assert len(os.listdir("/proc/self/fd")) == before, "a result that is dropped leaves nothing open"


def test_the_batch_of_a_result_lies_in_its_slot_or_in_memory_of_its_own(make):
    pool, image = make(), torch.arange(6).reshape(2, 3)
    for slot in (np.zeros(4096, np.uint8), None):
        payload, overflow, _ = dump((image, [3]), WorkerBuffer(slot))
        result = Result(0, (tuple(payload), overflow), overflowed=overflow is not None)
        reading = pool.open(result, None if slot is None else Lease(slot, None))
        assert (reading.batch.tolist(), reading.skipped) == (image.tolist(), [3])
        if overflow is not None:
            assert overflow.is_delivered, "a forked child may read the batch too"


def test_a_batch_whose_descriptor_was_lost_is_an_error_in_words(make):
    with pytest.raises(MachineFull, match="receiving a batch from a worker failed"):
        make().open(Result(0, (b"", None), overflowed=True), None)


def test_a_workers_error_is_of_its_class_and_has_its_traceback(make):
    try:
        raise KeyError("bad sample")
    except KeyError:
        wrapper = ExceptionWrapper(where="in a worker")
    error = make().open(Result(0, error=pickle.dumps(wrapper)), None)
    assert isinstance(error, KeyError)
    assert "Caught KeyError in a worker" in str(error)


# Deaths


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (-signal.SIGKILL, "is killed by signal: Killed."),
        (-1, "is killed by signal: Hangup."),
        (0, "exited unexpectedly with exit code 0."),
        (3, "exited unexpectedly with exit code 3."),
    ],
)
@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_dead_worker_is_reaped_and_told_in_torchs_words(make, monkeypatch, code, reason, has_pidfd):
    monkeypatch.setattr(Worker, "has_pidfd", has_pidfd)
    pool = make()
    worker = Worker.made[0]
    pool._control.rows[0] = 5
    worker.process.die(code)
    assert death(pool) == Death(0, f"DataLoader worker (pid 4321) {reason}", 5)
    assert worker.process.joined == [(BUSY_SECONDS, code)]
    assert worker.is_closed


def test_what_a_worker_sent_before_its_death_is_received_first(make):
    pool = make()
    pool.submit(0, 0, task(1), None, [])
    Worker.made[0].answers(0)
    Worker.made[0].process.die(1)
    result, event = received(pool)
    assert (result.number, event.worker) == (0, 0)


def test_a_worker_that_closes_its_socket_is_dead(make):
    pool = make()
    Worker.made[0].theirs.close()
    assert death(pool).worker == 0


def test_a_dead_worker_is_polled_no_more_and_the_next_reads_no_row(make):
    pool = make(2)
    worker = Worker.made[1]
    pool._control.rows[1] = 7
    worker.process.die(1)
    assert death(pool).row == 7
    assert set(pool._polled.values()) == {0}
    pool.submit(0, 5, task(1), None, [])
    Worker.made[0].answers(5)
    assert [event.number for event in received(pool)] == [5]
    pool.submit(1, 0, task(1), None, [])
    assert pool._control.rows[1] == NO_ROW
    assert sorted(pool._polled.values()) == [0, 0, 1, 1]
    Worker.made[2].answers(0)
    assert [event.number for event in received(pool)] == [0]


def test_without_pidfds_the_pool_looks_now_and_then_whether_workers_live(make, polls, monkeypatch):
    monkeypatch.setattr(Worker, "has_pidfd", False)
    pool = make()
    pool.submit(0, 0, task(1), None, [])
    pool._wait_and_receive()
    assert polls[0].waits == [pytest.approx(1000 * LOOK_SECONDS)]
    assert not pool.events
    Worker.made[0].answers(0)
    Worker.made[0].process.die(3, has_child=True)
    result, event = received(pool)
    assert (result.number, event.worker) == (0, 0)
    pool.submit(0, 1, task(1), None, [])
    Worker.made[1].process.die(3, has_child=True)
    assert death(pool).reason.endswith("exited unexpectedly with exit code 3.")
    assert len(polls[0].waits) == 3
    monkeypatch.setattr(Worker, "has_pidfd", True)
    pool = make()
    pool._wait_and_receive()
    assert polls[1].waits == [pytest.approx(1000 * START)]


# Time limits


def test_the_timeout_counts_from_when_a_worker_began_its_task(make, clock, polls):
    pool = make(timeout=5)
    worker = ready(pool)
    clock.now += 100
    for number in range(2):
        pool.submit(0, number, task(number), None, [])
        clock.now += 3
    worker.answers(0)
    assert [result.number for result in received(pool)] == [0]
    began = clock.now
    assert death(pool).reason == "DataLoader timed out after 5 seconds."
    assert clock.now == pytest.approx(began + 5), "it began the second when it had answered the first"
    assert worker.process.joined == [(BUSY_SECONDS, -signal.SIGKILL)], "it was killed before it was waited for"


def test_a_task_that_waits_for_its_workers_set_up_begins_after_it(make, clock):
    pool = make(timeout=5)
    pool.submit(0, 0, task(0), None, [])
    ready(pool, seconds=60)
    began = clock.now
    assert death(pool).reason == "DataLoader timed out after 5 seconds."
    assert clock.now == began + 5


@pytest.mark.parametrize(("timeout", "count"), [(0, 1), (5, 0)])
def test_without_a_timeout_or_a_task_a_worker_may_take_any_time(make, timeout, count):
    pool = make(timeout=timeout)
    ready(pool)
    for number in range(count):
        pool.submit(0, number, task(number), None, [])
    with pytest.raises(AssertionError, match="waits for ever"):
        pool.wait()


def test_a_worker_that_reads_sample_by_sample_has_the_timeout_for_each(make, clock):
    pool = make(timeout=5)
    ready(pool)
    pool._control.rows[0] = 0
    pool.submit(0, 0, task(1, 2, 3, singly=True), None, [])
    began = clock.now
    pool._wait_and_receive()
    pool._control.rows[0] = 1
    pool._wait_and_receive()
    event = death(pool)
    assert (event.row, event.reason) == (1, "DataLoader timed out after 5 seconds.")
    assert clock.now == began + 15


def test_a_worker_that_reads_a_whole_batch_has_the_timeout_once(make, clock):
    pool = make(timeout=5)
    ready(pool)
    pool._control.rows[0] = 1
    pool.submit(0, 0, task(1, 2, 3), None, [])
    began = clock.now
    assert death(pool).row == 1
    assert clock.now == began + 5


def test_the_earliest_limit_of_all_workers_counts_and_none_is_too_long_for_poll(make, clock, polls):
    pool = make(2, timeout=1e9)
    for worker in Worker.made:
        worker.says(STARTED, READY)
    pool._wait_and_receive()
    pool.submit(0, 0, task(0), None, [])
    polls[0].waits.clear()
    pool._wait_and_receive()
    assert polls[0].waits == [1000 * LONGEST_SECONDS]
    pool._timeout = 8
    clock.now += 5 - LONGEST_SECONDS
    pool.submit(1, 1, task(1), None, [])
    pool._wait_and_receive()
    assert polls[0].waits[1:] == [pytest.approx(3000)]


def test_a_limit_that_is_over_is_not_waited_for(make, clock, polls):
    pool = make(timeout=5)
    ready(pool)
    pool.submit(0, 0, task(0), None, [])
    clock.now += 50
    assert death(pool).worker == 0
    assert polls[0].waits[-1] == 0


# Closing


def test_close_asks_all_workers_to_exit_and_closes_them(make, clock, exits):
    pool = make(2)
    pool.close()
    assert exits == [(Worker.made, clock.now + process_pool.EXIT_SECONDS)]
    assert pool._control.is_stopping
    assert all(worker.is_closed for worker in Worker.made)
    pool.stop(7.0)
    assert len(exits) == 1, "there are none left"
    for call in (pool.wait, lambda: pool.submit(0, 0, task(0), None, []), lambda: pool._reap(0, Worker.made[0])):
        with pytest.raises(PoolClosed, match="the loader was closed"):
            call()


def test_workers_are_closed_at_the_interpreters_exit_even_if_waiting_is_interrupted(make, monkeypatch):
    registered: list = []
    monkeypatch.setattr(process_pool, "stop_at_exit", registered.append)
    pool = make()
    assert registered == [pool]

    def interrupted(workers, deadline) -> None:
        assert (workers, deadline) == (Worker.made, 7.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(process_pool, "wait_for_exit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.stop(7.0)
    assert Worker.made[0].is_closed


def test_a_pool_that_is_closed_while_it_receives_says_so(make):
    pool = make()
    receive = pool._wait_and_receive
    pool._wait_and_receive = lambda: (pool.close(), receive())
    with pytest.raises(PoolClosed, match="the loader was closed"):
        pool.wait()


def test_a_forked_child_leaves_its_parents_workers_alone(make, exits, monkeypatch):
    pool = make()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        pool.close()
    assert not exits
    assert not Worker.made[0].is_closed


def test_the_arrays_of_a_spawned_reader_are_freed_with_the_pool(make, monkeypatch):
    closed: list = []
    pool = make(method="spawn")
    monkeypatch.setattr(pool._reader, "close", lambda: closed.append(True))
    pool.close()
    assert closed == [True]
