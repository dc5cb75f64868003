"""What worker processes, worker threads, or the calling thread do, as a loader shows it."""

import os
import pickle
import random
import resource
import threading
import time
from multiprocessing import get_context, reduction

import numpy as np
import pytest
import torch
from example_datasets import Augmented, Numbers, Written, contents, outcomes
from torch.utils.data import DataLoader, get_worker_info

from loaders import WorkerLoader
from loaders.workers import process_pool, reader, thread_pool
from loaders.workers.pool import WorkerTimeout
from loaders.workers.spawning import LARGE

METHODS = pytest.mark.parametrize("method", ["multiprocessing", "thread"])


class Waiting(Numbers):
    """From sample 4 on it says that it `begins`, and waits for `go`."""

    def __init__(self, events) -> None:
        super().__init__(8)
        self.go, self.begins, self.read = events.Event(), events.Event(), []

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        if index >= 4:
            self.begins.set()
            assert self.go.wait(60)
        return index


def waiting(method: str) -> Waiting:
    return Waiting(threading if method == "thread" else get_context("fork"))


@METHODS
def test_a_failed_worker_init_fn_is_the_error_of_every_batch_of_that_worker(method):
    def init_fn(worker: int) -> None:
        if worker == 1:
            raise ValueError(f"no setup for {worker}")

    with WorkerLoader(Numbers(8), 2, num_workers=2, worker_method=method, worker_init_fn=init_fn) as loader:
        first, bad, third, worse = outcomes(loader)
    assert (first, third) == ([0, 1], [4, 5])
    assert "no setup for 1" in bad and "no setup for 1" in worse


@METHODS
@pytest.mark.parametrize("seed", [None, 0])
def test_whoever_waits_for_a_batch_is_told_that_the_loader_was_closed(method, seed, in_thread, bound, monkeypatch):
    monkeypatch.setattr(thread_pool, "FIRST_SECONDS", 0.1)
    dataset = waiting(method)
    loader = WorkerLoader(dataset, 4, num_workers=1, worker_method=method, seed=seed)
    iterator = iter(loader)
    next(iterator)
    assert dataset.begins.wait(bound)
    consumer = in_thread(next, iterator)
    loader.close()
    if method == "thread":  # a process has been killed, and would not answer the event
        dataset.go.set()
    with pytest.raises(RuntimeError, match="closed"):
        consumer.result(bound)


# Processes


def test_a_worker_is_set_up_as_torchs_is():
    def setups(kind: type) -> list:
        told = get_context("fork").SimpleQueue()

        def init_fn(worker: int) -> None:
            info = get_worker_info()
            assert (info.id, info.num_workers, info.seed) == (worker, 2, torch.initial_seed())
            told.put((worker, torch.get_num_threads(), info.seed, random.random(), np.random.random()))

        torch.manual_seed(3)
        list(kind(Numbers(4), 2, num_workers=2, worker_init_fn=init_fn))
        seen = sorted(told.get() for _ in range(2))
        told.close()
        return seen

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert setups(WorkerLoader) == setups(DataLoader)
    finally:
        torch.set_num_threads(threads)


class Slow(Numbers):
    def __getitem__(self, index: int) -> int:
        threading.Event().wait(0.8)
        return index


def test_the_timeout_is_that_of_a_batch_or_of_each_sample_that_is_read_singly():
    with WorkerLoader(Slow(3), 3, num_workers=1, seed=0, timeout=2, max_restarts=1) as loader:
        assert contents(loader) == [[0, 1, 2]], "the second attempt reads them singly"
        assert loader.stats()["workers"]["deaths"] == 1


def test_the_first_set_up_of_a_worker_has_no_limit(monkeypatch):
    monkeypatch.setattr(process_pool, "START_SECONDS", 0.3)
    settings = {"timeout": 0.5, "worker_init_fn": lambda worker: threading.Event().wait(1)}
    with WorkerLoader(Numbers(2), 2, num_workers=1, seed=0, **settings) as loader:
        assert contents(loader) == [[0, 1]]
        assert loader.stats()["workers"]["deaths"] == 0


def test_a_worker_without_descriptors_gets_an_error_in_words():
    def leave_none(worker: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limit[1]))

    with (
        WorkerLoader(Written(4), 2, num_workers=1, seed=0, worker_init_fn=leave_none) as loader,
        pytest.raises(RuntimeError, match="receiving a slot failed: too many open files"),
    ):
        next(loader)


def open_memfds() -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("memfd" in os.readlink(link) for link in links if os.path.lexists(link))


class Large(Numbers):
    """Each sample tells what the worker has got."""

    def __init__(self) -> None:
        super().__init__(2)
        self.large = np.arange(LARGE // 8).reshape(2, -1)
        self.same, self.turned, self.small = self.large, np.asfortranarray(self.large), np.arange(3)

    def __getitem__(self, index: int) -> np.ndarray:
        expected = np.arange(LARGE // 8).reshape(2, -1)
        equal = [np.array_equal(getattr(self, name), expected) for name in ("large", "turned")]
        self.large[:] = self.small[0] = 0
        return np.array([*equal, self.same is self.large, self.turned.flags.f_contiguous])


def test_workers_that_are_not_forked_share_large_arrays_until_they_write_to_them(monkeypatch):
    sizes, dataset, before = [], Large(), open_memfds()
    dumps = reduction.dump
    monkeypatch.setattr(reduction, "dump", lambda given, file: (dumps(given, file), sizes.append(file.tell())))
    with WorkerLoader(dataset, 1, num_workers=2, multiprocessing_context="spawn") as loader:
        assert all(batch.all() for batch in loader)
    assert len(sizes) == 4 and max(sizes) < LARGE // 4
    assert dataset.large[1, 0] > 0
    assert open_memfds() == before
    assert len(pickle.dumps(dataset)) > 2 * LARGE


# Threads


@pytest.mark.parametrize("where", ["task", "worker_init_fn"])
def test_a_thread_that_takes_longer_than_the_timeout_is_an_error(where, monkeypatch):
    monkeypatch.setattr(thread_pool, "FIRST_SECONDS", 0.1)
    dataset, go = waiting("thread"), threading.Event()
    init_fn = None if where == "task" else lambda worker: go.wait(60)
    settings = {"num_workers": 1, "worker_method": "thread", "timeout": 0.01, "worker_init_fn": init_fn}
    with (
        WorkerLoader(dataset, 8, **settings) as loader,
        pytest.raises(WorkerTimeout, match=r"timed out after 0\.01 seconds\. A thread cannot be restarted"),
    ):
        next(iter(loader))
    dataset.go.set()
    go.set()


def test_a_thread_that_is_stopped_reads_no_further_sample_and_a_stuck_one_is_left_behind(bound, caplog, monkeypatch):
    monkeypatch.setattr(thread_pool, "FIRST_SECONDS", 0.1)
    dataset, before = waiting("thread"), set(threading.enumerate())
    loader = WorkerLoader(dataset, 8, num_workers=1, worker_method="thread")
    iterator = iter(loader)
    threads = set(threading.enumerate()) - before
    assert dataset.begins.wait(bound)
    loader.close()
    assert not iterator._workers
    assert "was left behind: close() waited 0.1 s for it" in caplog.text
    began = time.monotonic()
    dataset.go.set()
    for thread in threads:
        thread.join(bound)
    assert time.monotonic() < began + bound / 2
    assert dataset.read == [0, 1, 2, 3, 4]


# The calling thread


def test_inline_another_thread_than_the_epochs_does_not_seed_and_says_so_once(in_thread, bound, caplog):
    reader.warn_of_unseeded_reading.cache_clear()
    with WorkerLoader(Augmented(4), 1, seed=1, persistent_workers=True) as loader:
        seeded = [batch[1].item() for batch in loader]
        loader.set_epoch(0)
        iterator = iter(loader)
        for _ in range(2):
            random.seed(4)
            assert in_thread(next, iterator).result(bound)[1].item() == random.Random(4).random()
        assert len(caplog.records) == 1
        loader.set_epoch(0)
        theirs = in_thread(list, loader).result(bound)  # that thread's epoch
        assert [batch[1].item() for batch in theirs] == seeded
