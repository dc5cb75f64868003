"""After each test of a loader no thread and no process of it is left; what could hang is waited for with a bound."""

import gc
import multiprocessing
import os
import resource
import threading
import time
from concurrent.futures import Future

import pytest

BOUND = 30.0  # seconds; only ever spent by a test that is about to fail

READERS = {
    "inline": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}


@pytest.fixture(params=READERS.values(), ids=READERS)
def reader(request) -> dict:
    """The settings that say who reads a WorkerLoader's samples."""
    return dict(request.param)


@pytest.fixture
def bound() -> float:
    """Seconds to wait for what must happen."""
    return BOUND


@pytest.fixture
def in_thread():
    """Calls a function in a thread; the Future's `result(bound)` is its value or raises its error."""

    def start(function, *args) -> Future:
        future: Future = Future()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    return start


@pytest.fixture
def descriptors_left():
    """Limits how many more descriptors this process may open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(count: int) -> None:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def torch_looks_often(monkeypatch):
    """Torch looks only every five seconds whether its workers are alive, and waits as long for one to end."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = running()
    yield
    if running() - before:
        gc.collect()  # an error that a test looked at can hold a loader in a cycle
    until = time.monotonic() + 10
    for one in running() - before:
        one.join(max(0.0, until - time.monotonic()))
    left = running() - before
    for process in left & set(multiprocessing.active_children()):
        process.kill()  # the tests after this one are not to blame
    assert not left, f"left behind: {left}"


def running() -> set:
    return {*threading.enumerate(), *multiprocessing.active_children()}
