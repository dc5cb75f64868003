"""After each test of a loader no thread and no process of it is left; what could hang is waited for with a bound."""

import os
import resource
import signal
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from every_loader import LOADERS, make
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

READERS = {
    "inline": {"num_workers": 0},
    "processes": {"num_workers": 1},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}


@pytest.fixture(params=READERS.values(), ids=READERS)
def reader(request):
    """The settings that say who reads a WorkerLoader's samples."""
    return dict(request.param)


# Each test that takes one of these runs with all of its values.


@pytest.fixture(params=[None, 0])
def seed(request):
    return request.param


@pytest.fixture(params=["multiprocessing", "thread"])
def method(request):
    return request.param


@pytest.fixture(params=[0, 1])
def num_workers(request):
    return request.param


@pytest.fixture(params=[0, 2])
def depth(request):
    return request.param


@pytest.fixture
def closed_later():
    """Closes a loader after the test, and returns it."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def in_thread():
    """Calls a function in a thread; the Future's `result(bound)` is its value or raises its error."""

    def start(function, *args):
        future = Future()

        def run():
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

    def limit(count):
        free = [os.dup(0) for _ in range(count)]  # not in a row, if earlier tests have left some open
        for fd in free:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(free, default=-1) + 1, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def torch_looks_often(monkeypatch):
    """Torch looks only every five seconds whether its workers are alive, and waits as long for one to end."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


@pytest.fixture
def alarm():
    """The program's handler of SIGALRM raises TimeoutError."""

    def expire(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def clock(monkeypatch):
    """Stands in for the `time` module of timers and timelines: time passes only where a test says so."""
    clock = SimpleNamespace(now=0.0, cpu=0.0)
    clock.perf_counter = lambda: clock.now
    clock.thread_time = lambda: clock.cpu
    for module in ("timing", "timeline", "work"):
        monkeypatch.setattr(f"loaders.{module}.time", clock)
    return clock


@pytest.fixture
def closes_soon(monkeypatch):
    """A loader that is closed waits half a second for its workers' samples, not five."""
    monkeypatch.setattr("loaders.workers.engine.CLOSE_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def check_what_is_left(nothing_left_behind):
    """Runs that check after every test of this folder."""


# For tests of every loader


# What these do, a preloader and the loaders under it do in the default run.
TWICE = ("preloader_over_streams", "preloader_over_threads", "preloader_over_torch")


@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.slow] if kind in TWICE else []) for kind in LOADERS])
def name(request):
    return request.param


@pytest.fixture
def case(name):
    return LOADERS[name]


@pytest.fixture
def build(name, closed_later):
    return lambda dataset=None, *args, **settings: closed_later(make(name, dataset, *args, **settings))
