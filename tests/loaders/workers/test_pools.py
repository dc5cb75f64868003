"""What every pool promises, and what only processes, threads, or the calling thread do."""

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
from torch.utils.data import default_collate, get_worker_info

from loaders.workers import process_pool, shared_memory, thread_pool
from loaders.workers.inline_pool import InlinePool
from loaders.workers.pool import Pool, PoolClosed, Result, WorkerTimeout
from loaders.workers.process_pool import ProcessPool
from loaders.workers.reader import Reader, spec_of
from loaders.workers.shared_memory import MachineFull
from loaders.workers.slots import SlotRing
from loaders.workers.spawning import LARGE
from loaders.workers.tasks import Task
from loaders.workers.thread_pool import ThreadPool

PAGE = shared_memory.page_aligned(1)


class Numbers:
    """Sample i is i and a draw; a negative one is bad; from 1000 on it says that it `begins`, and waits for `go`."""

    def __init__(self, events=threading) -> None:
        self.go, self.begins = events.Event(), events.Event()
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.read.append(index)
        if index < 0:
            raise IndexError(f"no sample {index}")
        if index >= 1000:
            self.begins.set()
            assert self.go.wait(60)
        return index, random.random()


class Pages(Numbers):
    """Sample i is a page of i."""

    def sample_spec(self) -> dict:
        return {"page": ((PAGE,), torch.uint8)}

    def read_batch(self, indices, out, random) -> None:
        out["page"].copy_(torch.from_numpy(indices)[:, None].expand(-1, PAGE))


@pytest.fixture
def make(request):
    """Makes pools of two workers (one inline) of the kind that the test is parametrized with, or of the one named."""
    pools, datasets = [], []

    def make(kind: str, dataset=None, init_fn=None, timeout: float = 0, seed=None, method: str = "fork") -> Pool:
        dataset = dataset or Numbers(get_context("fork") if kind == "process" else threading)
        datasets.append(dataset)
        reader = Reader(dataset, default_collate, True, seed, spec_of(dataset) if seed is not None else None, False)
        if kind == "process":
            pool: Pool = ProcessPool(reader, 2, get_context(method), 70, init_fn, timeout, 2)
        else:
            pool = ThreadPool(reader, 2, init_fn, timeout) if kind == "thread" else InlinePool(reader)
        pools.append(pool)
        return pool

    yield make
    for dataset in datasets:
        if isinstance(dataset, Numbers):
            dataset.go.set()
    for pool in pools:
        pool.close()


def task(*indices: int, **settings) -> Task:
    return Task(list(indices), 0, 0, np.arange(len(indices)), **settings)


def received(pool: Pool, count: int) -> list:
    """So many events, results by their numbers."""
    events: list = []
    while len(events) < count:
        pool.wait()
        events += pool.events
        pool.events.clear()
    assert len(events) == count
    return sorted(events, key=lambda event: event.number if isinstance(event, Result) else -1)


def indices(pool: Pool, result: Result, lease=None) -> list[int]:
    reading = pool.open(result, lease)
    if isinstance(reading, BaseException):
        raise reading
    return reading.batch[0].tolist()


def error(pool: Pool, result: Result) -> BaseException:
    raised = result.error if isinstance(result.error, BaseException) else pool.open(result, None)
    assert isinstance(raised, BaseException)
    return raised


WITH_WORKERS = pytest.mark.parametrize("kind", ["process", "thread"])


@WITH_WORKERS
def test_a_failed_worker_init_fn_is_the_error_of_every_task_of_that_worker(make, kind):
    def init_fn(worker: int) -> None:
        if worker == 1:
            raise ValueError(f"no setup for {worker}")

    pool = make(kind, init_fn=init_fn)
    for number in range(4):
        pool.submit(number % 2, number, task(number), None, [])
    results = received(pool, 4)
    assert [indices(pool, results[number]) for number in (0, 2)] == [[0], [2]]
    assert all("no setup for 1" in str(error(pool, results[number])) for number in (1, 3))


@WITH_WORKERS
def test_whoever_waits_is_told_that_the_pool_was_closed(make, kind, in_thread, bound):
    pool = make(kind)
    waiting = in_thread(pool.wait)
    pool.close()
    with pytest.raises(PoolClosed, match="the loader was closed"):
        waiting.result(bound)
    pool.close()


# Processes


def test_a_worker_is_set_up_as_torchs_is(make):
    told = get_context("fork").SimpleQueue()

    def init_fn(worker: int) -> None:
        info = get_worker_info()
        assert (info.id, info.num_workers, info.seed) == (worker, 2, 70 + worker)
        told.put((worker, torch.get_num_threads(), torch.initial_seed(), random.random(), np.random.random()))

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    make("process", init_fn=init_fn)
    torch.set_num_threads(threads)
    seen = sorted(told.get() for _ in range(2))
    draws = [random.Random(70 + worker).random() for worker in range(2)]
    assert [entry[:4] for entry in seen] == [(worker, 1, 70 + worker, draws[worker]) for worker in range(2)]
    assert seen[0][4] != seen[1][4]
    told.close()


def test_the_timeout_is_that_of_a_task_or_of_each_sample_read_singly_and_idle_workers_have_none(make):
    class Slow(Numbers):
        def __getitem__(self, index: int):
            threading.Event().wait(0.8)
            return super().__getitem__(index)

    pool = make("process", Slow(get_context("fork")), timeout=2)
    pool.submit(0, 0, task(0, 1, 2, singly=True), None, [])
    assert indices(pool, *received(pool, 1)) == [0, 1, 2]
    pool.submit(0, 1, task(0, 1, 2), None, [])
    (death,) = received(pool, 1)
    assert (death.worker, death.reason) == (0, "DataLoader timed out after 2 seconds.")


def test_the_first_set_up_of_a_worker_has_no_limit(make, monkeypatch):
    monkeypatch.setattr(process_pool, "START_SECONDS", 0.3)
    pool = make("process", timeout=0.5, init_fn=lambda worker: threading.Event().wait(1))
    pool.submit(0, 0, task(1), None, [])
    assert indices(pool, *received(pool, 1)) == [1]


def test_a_process_or_worker_without_descriptors_gets_an_error_in_words(make, descriptors_left):
    def leave_none(worker: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limit[1]))

    ring = SlotRing(1, True)
    ring.fit(2 * PAGE)
    lease = ring.acquire()
    pool = make("process", Pages(), init_fn=leave_none, seed=1)
    pool.submit(0, 0, task(5, 6), lease, [])
    (result,) = received(pool, 1)
    assert result.holds_slot
    assert "receiving a slot failed: too many open files" in str(error(pool, result))
    pool = make("process", Pages(), seed=1)
    for _ in range(2):
        pool.submit(0, 1, task(5, 6), None, [])
        (result,) = received(pool, 1)
    del result
    descriptors_left(0)
    pool.submit(0, 1, task(5, 6), None, [])
    (result,) = received(pool, 1)
    with pytest.raises(MachineFull, match="receiving a batch from a worker failed: too many open files"):
        pool.open(result, None)
    ring.close()


def open_memfds() -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("memfd" in os.readlink(link) for link in links if os.path.lexists(link))


class Large:
    """Each sample tells what the worker has got."""

    def __init__(self) -> None:
        self.large = np.arange(LARGE // 8).reshape(2, -1)
        self.same, self.turned, self.small = self.large, np.asfortranarray(self.large), np.arange(3)

    def __getitem__(self, index: int) -> np.ndarray:
        equal = [
            np.array_equal(getattr(self, name), np.arange(LARGE // 8).reshape(2, -1)) for name in ("large", "turned")
        ]
        self.large[:] = self.small[0] = 0
        return np.array([*equal, self.same is self.large, self.turned.flags.f_contiguous, index == 0])


def test_workers_that_are_not_forked_share_large_arrays_until_they_write_to_them(make, monkeypatch):
    sizes, dataset, before = [], Large(), open_memfds()
    dumps = reduction.dump
    monkeypatch.setattr(reduction, "dump", lambda given, file: (dumps(given, file), sizes.append(file.tell())))
    pool = make("process", dataset, method="spawn")
    for worker in range(2):
        pool.submit(worker, worker, task(0), None, [])
    for result in received(pool, 2):
        assert pool.open(result, None).batch.all()
    assert len(sizes) == 4 and max(sizes) < LARGE // 4
    assert dataset.large[1, 0] > 0
    pool.close()
    del result
    assert open_memfds() == before
    assert len(pickle.dumps(dataset)) > 2 * LARGE


# Threads


@pytest.mark.parametrize("where", ["task", "worker_init_fn"])
def test_a_thread_that_takes_longer_than_the_timeout_is_an_error(make, where):
    go = threading.Event()
    pool = make("thread", timeout=0.01, init_fn=None if where == "task" else lambda worker: go.wait(60))
    pool.submit(1, 0, task(1000), None, [])
    with pytest.raises(WorkerTimeout, match=r"timed out after 0\.01 seconds\. A thread cannot be restarted"):
        while True:
            pool.wait()
    go.set()


def test_a_thread_that_is_stopped_reads_no_further_sample_and_a_stuck_one_is_left_behind(
    make, bound, caplog, monkeypatch
):
    monkeypatch.setattr(thread_pool, "FIRST_SECONDS", 0.1)
    pool = make("thread")
    dataset = pool._reader.dataset
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]
    pool.submit(0, 0, task(1000, 2, 3), None, [])
    assert dataset.begins.wait(bound)
    pool.close()
    assert "was left behind: close() waited 0.1 s for it" in caplog.text
    began = time.monotonic()
    pool.stop(began + bound)  # as at the interpreter's exit
    assert time.monotonic() < began + bound / 2
    dataset.go.set()
    for thread in threads:
        thread.join(bound)
    assert dataset.read == [1000]


# The calling thread


def test_inline_another_thread_than_the_epochs_does_not_seed_and_says_so_once(make, in_thread, bound, caplog):
    thread_pool.warn_of_unseeded_reading.cache_clear()
    pool = make("inline", seed=1)
    for _ in range(2):
        pool.submit(0, 0, task(1), None, [])
        random.seed(4)
        (result,) = in_thread(received, pool, 1).result(bound)
        assert result.payload.batch[1].item() == random.Random(4).random()
    assert len(caplog.records) == 1
    in_thread(pool.begin).result(bound)  # that thread's epoch begins
    pool.submit(0, 0, task(1), None, [])
    (result,) = in_thread(received, pool, 1).result(bound)
    assert result.payload.batch[1].item() != random.Random(4).random()
