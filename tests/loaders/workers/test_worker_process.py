"""WorkerProcess and the wait for workers to exit, with a process that is none: no process is started."""

import errno
import os
import pickle
import select
import signal
from types import SimpleNamespace

import pytest

from loaders.workers import worker_process as module
from loaders.workers.connection import Connection
from loaders.workers.process_main import LEAVING, STOP, Setup, work
from loaders.workers.shared_memory import SharedMemory, create_shared_memory
from loaders.workers.slots import Slot
from loaders.workers.tasks import Task
from loaders.workers.worker_process import WorkerProcess, wait_for_exit

HAS_PIDFD = hasattr(os, "pidfd_open")


class Context:
    """Makes processes that are this one."""

    def __init__(self, method: str = "fork") -> None:
        self.method = method
        self.made: list = []
        self.error: BaseException | None = None
        self.mask: set = set()  # of signals blocked while the process starts

    def get_start_method(self) -> str:
        return self.method

    def Process(self, **given):  # multiprocessing's name
        process = SimpleNamespace(given=given, pid=os.getpid(), sentinel=77, calls=[], alive=True)
        process.start = lambda: self._start()
        process.kill = lambda: process.calls.append("kill")
        process.join = lambda: process.calls.append("join")
        process.is_alive = lambda: process.alive
        self.made.append(process)
        return process

    def _start(self) -> None:
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if self.error is not None:
            raise self.error


@pytest.fixture
def noted(monkeypatch):
    """What is done beside the process, in order; the signals that a pidfd gets are not sent."""
    calls: list = []
    monkeypatch.setattr(module, "protect_from_children", lambda process: calls.append(("leave to us", process)))
    monkeypatch.setattr(module, "forget", lambda process: calls.append(("forget", process)))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *given: calls.append(given), raising=False)
    return calls


def setup() -> Setup:
    return Setup(0, 1, 70, None, os.getpid(), False, set())


@pytest.fixture
def start(noted):
    workers = []

    def start(context: Context | None = None) -> WorkerProcess:
        workers.append(WorkerProcess(context or Context()))
        workers[-1].their_end = Connection(workers[-1]._end.dup(), blocking=False)
        workers[-1].start("reader", 7, setup())
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()
        worker.their_end.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_signals_are_blocked_until_the_worker_has_its_own_handlers(start, noted, method):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    context = Context(method)
    worker = start(context)
    assert signal.SIGINT in context.mask
    assert (signal.SIGTERM in context.mask) == (method == "fork")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    (process,) = context.made
    reader, memory_fd, given, end = process.given.pop("args")
    assert (reader, memory_fd, given.signal_mask, end) == ("reader", 7, before, worker._end)
    assert process.given == {"target": work, "daemon": True}
    assert worker._end.fileno() == -1, "a worker's end that the parent holds hides the worker's death"
    assert noted == [("leave to us", process)]


def test_a_process_that_cannot_start_changes_no_signal_and_leaves_nothing_open(noted):
    before, descriptors = signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.listdir("/proc/self/fd")
    context = Context()
    context.error = OSError(errno.EAGAIN, "no more processes")
    worker = WorkerProcess(context)
    with pytest.raises(OSError, match="no more processes"):
        worker.start(None, 7, setup())
    context.made[0].pid = None
    worker.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert os.listdir("/proc/self/fd") == descriptors
    assert not noted
    assert context.made[0].calls == []
    unstarted = WorkerProcess(context)
    unstarted.close()
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.skipif(not HAS_PIDFD, reason="a system without pidfd")
def test_a_worker_is_killed_and_watched_by_its_pidfd(start, noted):
    worker = start()
    assert worker.pidfd >= 0
    assert worker.descriptors() == (worker.connection.fileno(), worker.pidfd)
    worker.kill()
    assert noted[1:] == [(worker.pidfd, signal.SIGKILL)]
    assert worker.process.calls == []


@pytest.mark.parametrize("error", [AttributeError(), OSError(errno.ENOSYS, "none"), OSError(errno.EPERM, "sandbox")])
def test_without_pidfds_a_worker_is_killed_and_watched_by_its_process(start, monkeypatch, error):
    def refuse(pid: int) -> None:
        raise error

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    worker = start()
    assert worker.descriptors() == (worker.connection.fileno(), 77)
    worker.kill()
    assert worker.process.calls == ["kill"]


def test_a_process_without_descriptors_left_does_not_start_a_worker(start, monkeypatch):
    def refuse(pid: int) -> None:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    with pytest.raises(OSError, match="too many"):
        start()


def test_a_worker_that_has_gone_meanwhile_is_killed_without_a_word(start, monkeypatch):
    def gone(*_: object) -> None:
        raise ProcessLookupError

    worker = start()
    monkeypatch.setattr(signal, "pidfd_send_signal", gone, raising=False)
    worker.kill()


@pytest.mark.skipif(not HAS_PIDFD, reason="a system without pidfd")
def test_close_kills_reaps_and_forgets_the_process_and_closes_everything(noted):
    before = os.listdir("/proc/self/fd")
    worker = WorkerProcess(Context())
    theirs = Connection(worker._end.dup(), blocking=False)
    worker.start("reader", 7, setup())
    pidfd = worker.pidfd
    reading, writing = os.pipe()
    theirs.send(b"a result", [reading])
    for fd in (reading, writing):
        os.close(fd)
    siblings = worker.connection.socket.dup()  # a worker that is forked later has it too
    worker.close()
    with pytest.raises(BlockingIOError):
        siblings.recv(1)  # it keeps no memory of a result alive
    siblings.close()
    theirs.close()
    assert noted[1:] == [(pidfd, signal.SIGKILL), ("forget", worker.process)]
    assert worker.process.calls == ["join"]
    assert os.listdir("/proc/self/fd") == before
    worker.close()  # repeatedly, as after an error in start()
    assert worker.pidfd == -1


# Tasks


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_only_the_first_task_of_an_idle_worker_begins_at_once(start, clock):
    worker = start()
    clock.now = 101
    worker.submit(0, Task([1]), None, [])  # before it is ready
    assert worker.began == 100
    worker.tasks.clear()
    worker.is_ready = True
    for clock.now in (102, 103):
        worker.submit(int(clock.now), Task([1]), None, [])
    assert worker.began == 102
    assert set(worker.tasks) == {102, 103}
    assert not worker.reads_singly
    worker.tasks[104] = Task([1], singly=True)
    assert worker.reads_singly


def received(worker: WorkerProcess) -> tuple:
    """The next task that the worker receives, with its slot, and what descriptors come with it."""
    message, descriptors = worker.their_end.receive()
    inodes = [os.fstat(fd).st_ino for fd in descriptors]
    worker.their_end.done()
    return *pickle.loads(message), inodes


def test_a_slots_descriptor_comes_with_its_first_task_and_with_a_new_one_the_retired_slots(start):
    worker = start()
    slots = [Slot(number, SharedMemory(create_shared_memory(1)), 1) for number in range(3)]
    inodes = [os.fstat(slot.memory.fd).st_ino for slot in slots]
    task = Task([1])
    for number, slot in enumerate([slots[0], slots[0], slots[1]]):
        assert worker.submit(number, task, slot, [])
    assert [received(worker) for _ in range(3)] == [
        (0, task, (0, []), [inodes[0]]),
        (1, task, (0, []), []),
        (2, task, (1, []), [inodes[1]]),
    ]
    slots[0].is_retired = True
    for slot in (slots[1], slots[2], slots[2]):
        worker.submit(3, task, slot, [])
    assert [received(worker)[2:] for _ in range(3)] == [((1, []), []), ((2, [0]), [inodes[2]]), ((2, []), [])]
    worker.submit(4, task, None, [])
    assert received(worker) == (4, task, None, [])


def test_a_task_for_a_dead_worker_is_kept_so_that_it_is_retried(start):
    worker, sent = start(), []
    worker.their_end.close()
    assert worker.submit(3, Task([1]), None, sent)
    assert set(worker.tasks) == {3}
    assert sent


def test_a_full_socket_takes_no_task(start):
    worker, sent = start(), []
    while worker.submit(len(worker.tasks), Task(list(range(1000))), None, sent):
        assert len(sent) < 1000
    assert len(sent) == len(worker.tasks)
    assert select.select([], [worker.connection], [], 0)[1] == []


# Exit


@pytest.fixture
def waited(monkeypatch, clock):
    """Each wait takes an eighth of a second; `at` has what happens then, by time. Notes the sentinels waited for."""
    waited = SimpleNamespace(at={}, sentinels=[], exited=[])

    def wait(sentinels, timeout: float) -> list:
        assert 0 < timeout < 0.1, "whether a worker is leaving has to be looked at now and then"
        waited.sentinels.append(sentinels)
        clock.now += 0.125
        waited.at.pop(clock.now, lambda: None)()
        return waited.exited

    monkeypatch.setattr(module, "wait", wait)
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.375)
    return waited


def test_workers_are_told_to_stop_and_not_waited_for_longer_than_a_sample_may_take(start, waited, clock):
    workers = [start(), start()]
    wait_for_exit(workers, deadline=200.0)
    assert [worker.their_end.receive() for worker in workers] == [(STOP, [])] * 2
    assert clock.now == 100.375


def test_workers_that_are_exiting_have_until_the_deadline(start, waited, clock):
    leaving, busy = start(), start()
    waited.at[100.25] = lambda: leaving.their_end.send(LEAVING)
    wait_for_exit([leaving, busy], deadline=101.0)
    assert clock.now == 101
    assert [len(sentinels) for sentinels in waited.sentinels] == [2, 2, 2, 1, 1, 1, 1, 1]


def test_a_busy_worker_has_no_longer_than_the_deadline(start, waited, clock):
    wait_for_exit([start()], deadline=100.125)
    assert clock.now == 100.125


@pytest.mark.parametrize("how", ["its sentinel", "its process"])
def test_a_worker_that_has_exited_is_waited_for_no_more(start, waited, clock, how):
    worker = start()

    def exit() -> None:
        if how == "its sentinel":
            waited.exited.append(77)
        else:
            worker.process.alive = False

    waited.at[100.125] = exit
    wait_for_exit([worker], deadline=200.0)
    assert clock.now == 100.125


def test_a_worker_that_is_gone_and_other_messages_do_not_disturb_the_waiting(start, waited, clock):
    gone, leaving = start(), start()
    gone.their_end.close()
    leaving.their_end.send(LEAVING)
    leaving.their_end.send(b"a late result")
    wait_for_exit([gone, leaving], deadline=101.0)
    assert leaving.is_leaving
    assert clock.now == 101
