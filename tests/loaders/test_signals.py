"""A program's signal handlers and wakeup descriptor are its own, and no worker outlives it, however it ends."""

import os
import select
import signal
import socket
from multiprocessing import connection

import pytest
from example_datasets import Numbers, contents

from loaders import WorkerLoader

KINDS = {"seeded": {"seed": 0, "persistent_workers": True}, "unseeded": {"seed": None}}


@pytest.fixture
def wakeups():
    """The program has a handler of SIGTERM and a wakeup descriptor, as asyncio and Lightning do; what comes there."""
    theirs, ours = socket.socketpair()
    for end in (theirs, ours):
        end.setblocking(False)
    chld = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's DataLoader may have set one
    term = signal.signal(signal.SIGTERM, lambda *_: None)
    wakeup = signal.set_wakeup_fd(theirs.fileno())
    yield ours
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGTERM, term)
    signal.signal(signal.SIGCHLD, chld)
    theirs.close()
    ours.close()


@pytest.mark.parametrize("kind", KINDS)
def test_sigterm_kills_a_worker_and_a_terminal_does_not_and_neither_runs_the_programs_handlers(kind, wakeups, bound):
    with WorkerLoader(Numbers(400), 4, num_workers=2, **KINDS[kind]) as loader:
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(2)]  # one of each worker: both have started
        for worker in iterator._workers:
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGHUP)
        seen += [next(iterator) for _ in range(20)]
        assert loader.stats()["workers"]["deaths"] == 0
        worker = iterator._workers[0]
        os.kill(worker.pid, signal.SIGTERM)
        happened = connection.wait([worker.sentinel, wakeups], bound)
        assert wakeups not in happened, "a worker's signal came to the parent's wakeup descriptor"
        assert worker.sentinel in happened, "the worker outlived the signal"
        seen += iterator
    assert contents(seen) == [list(range(start, start + 4)) for start in range(0, 400, 4)]
    with pytest.raises(BlockingIOError):
        wakeups.recv(1)


EARLY = """
import os, signal
from loaders import WorkerLoader
for number in (signal.SIGINT, signal.SIGHUP):
    os.register_at_fork(after_in_child=lambda number=number: os.kill(os.getpid(), number))
with WorkerLoader(range(8), 4, seed=0, num_workers=2) as loader:
    print([batch.tolist() for batch in loader], loader.stats()["workers"]["deaths"])
"""


def test_a_terminal_does_not_end_a_worker_that_has_just_started(python, bound):
    done = python.run("-c", EARLY, timeout=bound)
    assert (done.stdout, done.stderr) == ("[[0, 1, 2, 3], [4, 5, 6, 7]] 0\n", "")


ORPHANS = """
import os, signal, sys
sys.path.insert(0, "tests/loaders")
from example_datasets import Slow
from loaders import Preloader, WorkerLoader
import multiprocessing

loaders = [
    WorkerLoader(Slow(4000), 4, num_workers=2, seed=0, persistent_workers=True),
    Preloader(WorkerLoader(Slow(4000), 4, num_workers=2, seed=0, persistent_workers=True), "cpu", 2),
    WorkerLoader(Slow(4000), batch_sampler=[[0], [1], [2] * 100_000], num_workers=2, prefetch_factor=8),
]
iterators = [iter(loader) for loader in loaders]
for iterator in iterators:
    next(iterator)
print(*[process.pid for process in multiprocessing.active_children()], flush=True)
if sys.argv[1] == "raises":
    raise KeyError("mine")
if sys.argv[1] == "handles SIGTERM":  # as Lightning does
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.exit(3)
if sys.argv[1] == "exits":
    os._exit(3)
for iterator in iterators:
    for _ in iterator:
        pass
"""


@pytest.mark.parametrize(
    "end",
    [
        *(signal.SIGKILL, signal.SIGINT, "handles SIGTERM"),
        *(pytest.param(end, marks=pytest.mark.slow) for end in (signal.SIGTERM, "raises", "exits")),
    ],
)
def test_workers_end_after_their_sample_when_their_program_ends(end, python, bound):
    with python.start("-c", ORPHANS, end) as program:
        pidfds = [os.pidfd_open(int(pid)) for pid in program.stdout.readline().split()]
        assert len(pidfds) == 6
        if not isinstance(end, str):
            program.send_signal(end)
        _, errors = program.communicate(timeout=bound)
        assert "process_main.py" not in errors and "Restarting" not in errors
        assert program.returncode == (3 if end in ("exits", "handles SIGTERM") else program.returncode)
        for fd in pidfds:
            assert select.select([fd], [], [], bound)[0], "a worker has outlived its program"
            os.close(fd)


REAPER = """
import os, signal
from loaders import WorkerLoader

def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, {handler})
for persistent in (True, False):
    with WorkerLoader(range(8), 4, seed=0, num_workers=2, persistent_workers=persistent) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
print("closed")
"""


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "reap"])
def test_close_sees_the_exit_of_workers_that_the_program_reaps_itself(python, handler, bound):
    done = python.run("-c", REAPER.format(handler=handler), timeout=bound)
    assert done.stdout == "closed\n", done.stderr
