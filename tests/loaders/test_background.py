"""Background threads use one core each, and change nothing for other threads."""

import math
import os
import threading

import pytest
import torch
from example_datasets import Numbers, Waiting

from loaders import Preloader, WorkerLoader, background
from loaders.background import start_thread

LARGE = torch.ones(1 << 20)  # torch adds so many numbers on several cores
MAINS = 4


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(MAINS)
    yield
    torch.set_num_threads(before)


def cores_used():
    """Torch's number of threads in the calling thread after an operation, and how many threads that started."""
    before = set(os.listdir("/proc/self/task"))
    LARGE.add(LARGE)
    return torch.get_num_threads(), len(set(os.listdir("/proc/self/task")) - before)


def seen_in(start, bound):
    """How many threads torch has in a thread that `start(function)` starts, in an operation after it has returned."""
    has_returned = threading.Event()
    seen = []

    def compute():
        assert has_returned.wait(bound)
        seen.append(cores_used())

    thread = start(compute)
    has_returned.set()
    thread.join(bound)
    number, started = seen[0]
    assert number > 1 or not started
    return number


def plain_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_a_started_thread_computes_on_one_core_and_all_others_as_before(bound):
    assert seen_in(lambda function: start_thread("of the test", function), bound) == 1
    assert torch.get_num_threads() == MAINS
    assert seen_in(plain_thread, bound) == MAINS


def test_a_background_thread_that_starts_another_changes_nothing_for_others(bound):
    seen = []

    def start_another():
        seen.append(seen_in(lambda function: start_thread("inner", function), bound))
        seen.append(torch.get_num_threads())

    start_thread("outer", start_another).join(bound)
    assert seen == [1, 1]
    assert seen_in(plain_thread, bound) == MAINS


def test_threads_that_start_at_once_compute_on_one_core_each(bound):
    at_once = threading.Barrier(8)
    seen = []

    def start():
        at_once.wait(bound)
        start_thread("of the test", lambda: seen.append(cores_used())).join(bound)

    threads = [plain_thread(start) for _ in range(8)]
    for thread in threads:
        thread.join(bound)
    assert [number for number, _ in seen] == [1] * 8
    assert seen_in(plain_thread, bound) == MAINS


class Cores(Numbers):
    """A sample is torch's number of threads after an operation in the worker."""

    def __getitem__(self, index):
        return cores_used()[0]


def test_thread_workers_and_the_preloaders_thread_compute_on_one_core(bound):
    loader = WorkerLoader(Cores(8), 2, num_workers=2, worker_method="thread", seed=0)
    with Preloader(loader, "cpu", 2, lambda batch, random: (batch, cores_used()[0])) as batches:
        for numbers, transforms in batches:
            assert (numbers.tolist(), transforms) == ([1, 1], 1)
    assert seen_in(plain_thread, bound) == MAINS


def test_the_exit_waits_for_all_stuck_threads_together(monkeypatch, in_thread, bound):
    def batches():
        yield 0
        dataset.go.wait(60)

    monkeypatch.setattr(background, "EXIT_SECONDS", 0.1)
    monkeypatch.setattr(background, "_exit_deadline", math.inf)
    for name in ("preload.engine.JOIN_SECONDS", "preload.engine.GIVE_UP_SECONDS", "workers.engine.CLOSE_SECONDS"):
        monkeypatch.setattr(f"loaders.{name}", 10 * bound)
    dataset = Waiting(8, 4, threading)
    loaders = [WorkerLoader(dataset, 4, num_workers=1, worker_method="thread", seed=0), batches()]
    preloaders = [Preloader(loader, "cpu", 2) for loader in loaders]
    for preloader in preloaders:
        next(preloader)
    assert dataset.begins.wait(bound)
    in_thread(background._stop_all).result(bound)
    dataset.go.set()
    monkeypatch.setattr(background, "_exit_deadline", math.inf)
    for preloader in preloaders:
        preloader.close()
