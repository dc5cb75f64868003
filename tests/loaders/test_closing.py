"""close() and the ends of iterators give workers and threads the time that they are owed, and no more."""

import gc
import multiprocessing
import os
import select
import signal
import threading
import weakref

import pytest
from example_datasets import Faulty, Numbers, Slow, contents

from loaders import Preloader, WorkerLoader


@pytest.mark.parametrize(("method", "workers"), [("multiprocessing", 6), ("thread", 0)])
def test_close_ends_older_independent_iterators_too(seed, method, workers):
    loader = WorkerLoader(Numbers(400), 4, num_workers=2, seed=seed, worker_method=method)
    iterators = [iter(loader) for _ in range(3)]
    kept = [next(iterator) for iterator in iterators]
    pidfds = [os.pidfd_open(worker.pid) for worker in multiprocessing.active_children()]
    assert len(pidfds) == workers
    loader.close()
    for fd in pidfds:
        assert select.select([fd], [], [], 0)[0], "a worker still runs"
        os.close(fd)
    for iterator in iterators:
        with pytest.raises(RuntimeError, match="closed"):
            next(iterator)
    assert contents(kept) == [[0, 1, 2, 3]] * 3


class Locking(Numbers):
    """Each sample but the first is read under a lock, and takes a while."""

    def __init__(self, seconds):
        super().__init__(40)
        self.seconds = seconds
        self.lock = multiprocessing.Lock()
        self.is_locked = multiprocessing.Event()
        self.has_begun = multiprocessing.Event()

    def __getitem__(self, index):
        if index == 0:
            self.has_begun.set()
            return index
        self.has_begun.wait()
        with self.lock:
            self.is_locked.set()
            threading.Event().wait(self.seconds)
            return index


@pytest.mark.parametrize("seconds", [0.4, 60])
def test_a_worker_finishes_its_sample_and_so_releases_its_lock_unless_that_takes_long(
    seed, depth, seconds, bound, request, monkeypatch
):
    if seconds == 60:
        request.getfixturevalue("closes_soon")
    monkeypatch.setattr("loaders.workers.process_pool.REAP_SECONDS", 0)
    with Preloader(WorkerLoader(Locking(seconds), 1, num_workers=2, seed=seed), "cpu", depth) as loader:
        iterator = iter(loader)
        workers = multiprocessing.active_children()
        assert next(iterator).tolist() == [0]
        assert loader.dataset.is_locked.wait(bound)
    if seconds < 1:
        assert [worker.exitcode for worker in workers] == [0, 0]
        assert loader.dataset.lock.acquire(timeout=bound)
    else:
        assert -signal.SIGKILL in [worker.exitcode for worker in workers]


def test_a_worker_that_is_in_the_middle_of_a_batch_ends_after_its_sample(method, bound, caplog):
    with WorkerLoader(Slow(1000), 1000, num_workers=1, worker_method=method) as loader:  # a batch: 20 seconds
        _iterator = iter(loader)
        workers = multiprocessing.active_children()
        assert loader.dataset.begun.wait(bound)
    assert all(worker.exitcode == 0 for worker in workers) and "left behind" not in caplog.text


def test_loaders_that_only_the_garbage_collector_finds_end_their_workers(seed):
    def cycle():
        loader = WorkerLoader(Numbers(40), 4, num_workers=1, seed=seed)
        iterator = iter(loader)
        cyclic = [loader, iterator, next(iterator)]
        cyclic.append(cyclic)
        return cyclic

    cycles = [cycle(), cycle()]  # the second one's worker inherits the connection of the first one's
    workers = multiprocessing.active_children()
    del cycles
    gc.collect()
    for worker in workers:
        worker.join(5)
    assert [worker.exitcode for worker in workers] == [0, 0]


class Collecting(Numbers):
    """Its last sample collects garbage, when that is `due`."""

    is_read = threading.Event()
    due = threading.Event()
    done = threading.Event()

    def __getitem__(self, index):
        if index == self.length - 1:
            self.is_read.set()
            if self.due.wait(60):
                gc.collect()
                self.done.set()
        return index


def test_a_loader_that_is_collected_in_one_of_its_threads_is_not_said_to_be_stuck(caplog, bound):
    cyclic = [WorkerLoader(Collecting(8), 4, num_workers=2, worker_method="thread")]
    cyclic += [iter(cyclic[0]), cyclic]
    assert Collecting.is_read.wait(bound)
    del cyclic
    Collecting.due.set()
    assert Collecting.done.wait(bound)
    assert "left behind" not in caplog.text


@pytest.mark.parametrize(("seed", "num_workers"), [(None, 1), (0, 1), (0, 0)])
def test_an_error_of_a_sample_keeps_no_loader_alive(seed, num_workers):
    gc.disable()
    try:
        loader = WorkerLoader(Faulty(40, 6), 4, seed=seed, num_workers=num_workers)
        is_alive = weakref.ref(loader)
        with pytest.raises(ValueError, match="bad"):
            list(loader)
        del loader
        assert is_alive() is None
    finally:
        gc.enable()
    assert not multiprocessing.active_children()
