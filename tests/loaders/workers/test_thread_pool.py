"""Threads read tasks, never touch the global generators, and are left behind if they hang."""

import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from loaders import timeline
from loaders.workers import thread_pool
from loaders.workers.pool import PoolClosed, WorkerTimeout
from loaders.workers.reader import Reader
from loaders.workers.slots import Lease
from loaders.workers.tasks import Task
from loaders.workers.thread_pool import ThreadPool, warn_of_unseeded_reading


class Numbers:
    """Sample i is the number i; `hold` makes reading wait, and `reading` tells that it does."""

    def __init__(self) -> None:
        self.hold, self.reading = threading.Event(), threading.Event()
        self.hold.set()
        self.read: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.reading.set()
        assert self.hold.wait(60)
        self.read.append(index)
        if index < 0:
            raise SystemExit(index)
        return index


@pytest.fixture
def dataset():
    dataset = Numbers()
    yield dataset
    dataset.hold.set()


@pytest.fixture
def make(dataset):
    pools = []

    def make(num_workers: int = 2, init_fn=None, timeout: float = 0, seed: int | None = None) -> ThreadPool:
        reader = Reader(dataset, default_collate, True, seed, None, False)
        pools.append(ThreadPool(reader, num_workers, init_fn, timeout))
        return pools[-1]

    yield make
    dataset.hold.set()
    for pool in pools:
        pool.close()


def task(*indices: int) -> Task:
    return Task(list(indices), 0, 0, np.arange(len(indices)))


def received(pool: ThreadPool, count: int) -> dict:
    results: dict = {}
    while len(results) < count:
        pool.wait()
        results |= {result.number: result for result in pool.events}
        pool.events.clear()
    return results


@pytest.mark.parametrize("timeout", [0, 60, 1e300])
def test_each_worker_reads_its_tasks_in_order(make, dataset, timeout):
    pool = make(timeout=timeout)
    for number in range(4):
        assert pool.submit(number % 2, number, task(number, 10 + number), None, [])
    results = received(pool, 4)
    batches = {number: pool.open(result, None).batch.tolist() for number, result in results.items()}
    assert batches == {number: [number, 10 + number] for number in range(4)}
    assert [index for index in dataset.read if index % 2 == 0] == [0, 10, 2, 12]
    assert (pool.num_workers, pool.processes, pool.writes_to_slots) == (2, [], False)


def test_threads_are_stopped_at_the_interpreters_exit(make, monkeypatch):
    registered: list = []
    monkeypatch.setattr(thread_pool, "stop_at_exit", registered.append)
    pool = make()
    assert registered == [pool]
    pool.stop(time.monotonic() + 60)
    assert not any(thread.is_alive() for thread in pool._shared.threads)


def test_an_error_even_system_exit_is_its_tasks_and_the_thread_goes_on(make):
    pool = make(1)
    pool.submit(0, 0, task(-3), None, [])
    pool.submit(0, 1, task(3), None, [])
    results = received(pool, 2)
    assert isinstance(results[0].error, SystemExit)
    assert results[0].payload is None
    assert results[1].error is None


def test_a_failed_worker_init_fn_is_every_tasks_error(make, dataset):
    error, seen = ValueError("no setup"), []

    def init_fn(worker: int) -> None:
        seen.append(worker)
        if worker == 1:
            raise error

    pool = make(init_fn=init_fn)
    for number in range(4):
        pool.submit(number % 2, number, task(number), None, [])
    results = received(pool, 4)
    assert sorted(seen) == [0, 1]
    assert [results[number].error for number in range(4)] == [None, error, None, error]
    assert sorted(dataset.read) == [0, 2]


def test_a_batch_lies_in_its_slot_but_for_small_parts(make, dataset, monkeypatch):
    monkeypatch.setattr(Numbers, "__getitem__", lambda _, index: (torch.ones(512), torch.tensor(index)))
    slot = np.zeros(1 << 13, np.uint8)
    pool = make(1)
    pool.submit(0, 0, task(5, 6), Lease(slot, None), [])
    pool.submit(0, 1, task(*range(9)), Lease(slot[:64], None), [])
    results = received(pool, 2)
    images, labels = results[0].payload.batch
    slot[:] = 0
    assert not images.any()
    assert labels.tolist() == [5, 6]
    assert [results[number].overflowed for number in (0, 1)] == [False, True]
    assert results[0].needed == 4096 + 64


def test_the_seconds_of_reading_and_of_waiting_for_a_task_are_counted(make, monkeypatch):
    ticks = iter(range(100))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), thread_time=lambda: 0.0)
    monkeypatch.setattr(timeline, "time", clock)
    pool, results = make(1), {}
    for number in (0, 1):
        pool.submit(0, number, task(number), None, [])
        results |= received(pool, 1)
    second = results[1]
    assert (second.work.seconds, second.work.wait_seconds, second.is_pickled) == (1.0, 1.0, False)


def test_a_task_that_takes_longer_than_the_timeout_is_an_error(make, dataset, bound):
    dataset.hold.clear()
    pool = make(timeout=0.01)
    pool.submit(1, 0, task(5), None, [])
    assert dataset.reading.wait(bound)
    with pytest.raises(WorkerTimeout, match=r"timed out after 0\.01 seconds"):
        pool.wait()


def test_the_timeout_counts_from_the_start_of_the_oldest_task(make, dataset, bound):
    pool = make(timeout=3600)
    for worker in (0, 1):
        pool.submit(worker, worker, task(worker), None, [])
    received(pool, 2)
    pool._shared.began[:] = [time.monotonic() - 3599.99, time.monotonic()]
    with pytest.raises(WorkerTimeout):
        pool.wait()
    pool._shared.began[:] = [None, None]


def test_a_worker_init_fn_that_hangs_is_a_timeout(make):
    release = threading.Event()
    pool = make(init_fn=lambda worker: release.wait(60), timeout=0.01)
    with pytest.raises(WorkerTimeout):
        pool.wait()
    release.set()


def test_a_pool_that_nobody_refers_to_stops_its_threads(dataset, bound):
    pool = ThreadPool(Reader(dataset, default_collate, True, None, None, False), 2, None, 0)
    threads = pool._shared.threads
    del pool
    for thread in threads:
        thread.join(bound)
    assert not any(thread.is_alive() for thread in threads)


def test_a_closed_pool_says_so_to_whoever_waits(make, in_thread, bound, monkeypatch):
    errors: list = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    pool = make()
    waiting = in_thread(pool.wait)
    pool.close()
    with pytest.raises(PoolClosed, match="was closed"):
        waiting.result(bound)
    assert not any(thread.is_alive() for thread in pool._shared.threads)
    assert errors == []


def test_a_thread_that_is_stopped_reads_no_further_sample(make, dataset, bound):
    dataset.hold.clear()
    pool = make(1)
    pool.submit(0, 0, task(1, 2, 3), None, [])
    assert dataset.reading.wait(bound)
    pool.stop(0)
    dataset.hold.set()
    pool.stop(time.monotonic() + bound)
    assert dataset.read == [1]
    assert not any(thread.is_alive() for thread in pool._shared.threads)


@pytest.mark.parametrize(
    ("longest", "patience"), [(None, 5.0), (0.01, 0.5), (10.0, 30.0)], ids=["no batch yet", "short", "long"]
)
def test_close_waits_as_long_as_batches_take_and_then_leaves_the_thread_behind(
    make, dataset, bound, caplog, monkeypatch, longest, patience
):
    dataset.hold.clear()
    pool = make(1)
    pool.submit(0, 0, task(1), None, [])
    assert dataset.reading.wait(bound)
    pool._shared.longest_seconds = longest
    deadlines = []
    monkeypatch.setattr(thread_pool, "time", SimpleNamespace(monotonic=lambda: 1000.0, perf_counter=time.perf_counter))
    monkeypatch.setattr(pool._shared, "stop", deadlines.append)
    pool.close()
    monkeypatch.undo()  # the fixture closes it in earnest
    assert deadlines == [1000.0 + patience]
    assert f"close() waited {patience:.1f} s for it" in caplog.text


@pytest.mark.parametrize("seed", [None, 1])
def test_a_seeded_dataset_without_read_batch_is_warned_of_once_and_draws_the_programs_numbers(make, caplog, seed):
    warn_of_unseeded_reading.cache_clear()
    before = random.getstate()
    for _ in range(2):
        pool = make(1, seed=seed)
        pool.submit(0, 0, task(1), None, [])
        received(pool, 1)
    assert random.getstate() == before
    assert len(caplog.records) == (seed is not None)
