"""Skips tests marked `cuda` without a CUDA device, makes forks fast, and has the fixtures that all tests share."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import yaml

from tests.infrastructure.python_server import PythonServer, use_huge_pages

# The tests' tensors are so small that a second thread would only slow them down. Torch reads it when it is imported:
# not here, as the process that only hands out tests would wait seconds for it.
os.environ["OMP_NUM_THREADS"] = "1"
# What the user has set for jobs, accounts and proxies is not for the runs and servers of the tests.
for variable in list(os.environ):
    if variable.startswith(("AWS_", "MLFLOW_", "SLURM_", "TORCHELASTIC_", "WANDB_")):
        del os.environ[variable]
os.environ.update(NO_PROXY="localhost,127.0.0.1", no_proxy="localhost,127.0.0.1")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # read when Hugging Face's packages are imported
if yaml.__with_libyaml__:  # Hydra reads 26 files a run: in C this takes a tenth of the time
    yaml.SafeLoader = yaml.CSafeLoader
    yaml.Dumper = yaml.CDumper
BOUND = 60.0  # seconds; only a test that is about to fail waits so long


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    items.sort(key=lambda item: "tests/loaders/" not in item.nodeid)  # these first: see later.py
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device, or -m cuda was not given"))


def pytest_configure(config: pytest.Config) -> None:
    if "cuda" not in config.option.markexpr:  # the other tests compare with tensors on the CPU, and with its bits
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with SIGINT ignored
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # one that nohup starts, with SIGHUP


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # else each collection, in a test or a process that it forks, visits a million objects of libraries
    use_huge_pages()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that the interpreter can free them, which some libraries check


@pytest.fixture
def bound() -> float:
    """How many seconds a test waits for something that must happen before it fails."""
    return BOUND


@pytest.fixture(scope="session")
def python(testrun_uid: str) -> Iterator[PythonServer]:
    """Starts programs, each in a new interpreter."""
    server = PythonServer(testrun_uid)
    yield server
    server.close()


@pytest.fixture
def nothing_left_behind():
    """Checks that the test leaves no thread and no process running."""
    before = running()
    yield
    until = time.monotonic() + 10
    while (left := running() - before) and time.monotonic() < until:
        gc.collect()  # a caught exception can hold a loader in a cycle; it does nothing while another thread collects
        for thread_or_process in left:
            thread_or_process.join(0.1)
    for process in left & set(multiprocessing.active_children()):
        process.kill()  # so that later tests do not fail for it too
    assert not left, f"left behind: {left}"


def running() -> set:
    """The threads and child processes that are alive now."""
    return {*threading.enumerate(), *multiprocessing.active_children()}
