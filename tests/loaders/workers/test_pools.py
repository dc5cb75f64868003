"""What worker processes, worker threads, or the calling thread do, as a loader shows it."""

import multiprocessing
import os
import random
import resource
import threading

import numpy as np
import pytest
import torch
from example_datasets import Numbers, Waiting, Written, outcomes
from torch.utils.data import DataLoader, get_worker_info

from loaders import WorkerFailure, WorkerLoader
from loaders.workers.reader import TaskReader
from loaders.workers.thread_pool import ThreadPool


def test_a_failed_worker_init_fn_is_the_error_of_every_batch_of_that_worker(method):
    def init_fn(worker):
        if worker == 1:
            raise ValueError(f"no setup for {worker}")

    with WorkerLoader(Numbers(8), 2, num_workers=2, worker_method=method, worker_init_fn=init_fn) as loader:
        first, bad, third, worse = outcomes(loader)
    assert (first, third) == ([0, 1], [4, 5])
    assert "no setup for 1" in bad and "no setup for 1" in worse


def test_whoever_waits_for_a_batch_is_told_that_the_loader_was_closed(method, seed, in_thread, bound):
    dataset = Waiting(8, 4, threading if method == "thread" else multiprocessing)
    loader = WorkerLoader(dataset, 4, num_workers=1, worker_method=method, seed=seed)
    iterator = iter(loader)
    next(iterator)
    assert dataset.begins.wait(bound)
    consumer = in_thread(next, iterator)
    closer = in_thread(loader.close)
    with pytest.raises(RuntimeError, match="closed"):
        consumer.result(bound)
    dataset.go.set()
    closer.result(bound)


# Processes


def test_a_worker_is_set_up_as_torchs_is():
    def setups(kind, **options):
        told = multiprocessing.SimpleQueue()

        def init_fn(worker):
            info = get_worker_info()
            assert (info.id, info.num_workers, info.seed) == (worker, 2, torch.initial_seed())
            told.put((worker, torch.get_num_threads(), info.seed, random.random(), np.random.random()))

        torch.manual_seed(3)
        list(kind(Numbers(4), 2, num_workers=2, worker_init_fn=init_fn, **options))
        seen = sorted(told.get() for _ in range(2))
        told.close()
        return seen

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert setups(WorkerLoader) == setups(DataLoader, multiprocessing_context="fork")
    finally:
        torch.set_num_threads(threads)


def test_a_worker_without_descriptors_gets_an_error_in_words():
    def leave_none(worker):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limit[1]))

    with (
        WorkerLoader(Written(4), 2, num_workers=1, seed=0, worker_init_fn=leave_none) as loader,
        pytest.raises(RuntimeError, match="too many open files"),
    ):
        next(loader)


# Threads


class Whole(TaskReader):
    """Reads a task as a whole, so it marks no row: says that this `begins`, and waits for `go`."""

    def __init__(self):
        super().__init__(None, list, 0, skips=False, retries=0, spec={})
        self.begins = threading.Event()
        self.go = threading.Event()
        self.tasks = []

    def read(self, task, buffer, reading, seeds=True):
        self.tasks.append(task)
        self.begins.set()
        assert self.go.wait(60)


def test_a_thread_that_is_killed_ends_after_its_batch_and_reads_no_other_task(bound):
    reader = Whole()
    pool = ThreadPool(reader, 1, None, 0)
    for number in range(3):
        pool.submit(0, number, number, None)
    (thread,) = pool._threads
    assert reader.begins.wait(bound)
    pool.kill()
    reader.go.set()
    thread.join(bound)
    assert not thread.is_alive() and reader.tasks == [0]


@pytest.mark.parametrize("where", ["sample 4", "worker_init_fn"])
def test_a_thread_that_takes_longer_than_the_timeout_is_an_error_that_says_where(where, bound):
    dataset = Waiting(8, 4, threading)
    init_fn = None if where == "sample 4" else lambda worker: dataset[4]
    settings = {"num_workers": 1, "worker_method": "thread", "timeout": 0.01, "worker_init_fn": init_fn}
    loader = WorkerLoader(dataset, 8, **settings)
    iterator = iter(loader)
    assert dataset.begins.wait(bound)
    with pytest.raises(WorkerFailure, match=rf"0\.01 seconds .*{where}\. A thread"):
        next(iterator)
    dataset.go.set()
    loader.close()
