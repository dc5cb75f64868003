"""close() ends every iterator of a loader, and gives workers and threads the time that they are owed, and no more."""

import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
from multiprocessing import util
from pathlib import Path

import pytest
from example_datasets import Faulty, Noisy, Numbers, Written, contents, failing

from loaders import Preloader, WorkerLoader


def alone(loader: WorkerLoader) -> WorkerLoader:
    return loader


def preloaded(loader: WorkerLoader) -> Preloader:
    return Preloader(loader, "cpu", 2)


METHODS = pytest.mark.parametrize("method", ["multiprocessing", "thread"])


# Older iterators


@METHODS
@pytest.mark.parametrize("seed", [0, None])
def test_close_ends_older_independent_iterators_too(seed, method, bound):
    loader = WorkerLoader(Numbers(400), 4, num_workers=2, seed=seed, worker_method=method)
    iterators = [iter(loader) for _ in range(3)]
    kept = [next(iterator) for iterator in iterators]
    pidfds = [os.pidfd_open(worker.pid) for iterator in iterators for worker in iterator._workers]
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]
    loader.close()
    for fd in pidfds:
        assert select.select([fd], [], [], 0)[0], "a worker still runs"
        os.close(fd)
    assert not any(thread.is_alive() for thread in threads)
    for iterator in iterators:
        with pytest.raises(RuntimeError, match="closed"):
            next(iterator)
    assert contents(kept) == [[0, 1, 2, 3]] * 3


# Threads


class SlowBatches(Written):
    """Each batch takes half a second, and cannot be left in its middle."""

    def read_batch(self, indices, out, random) -> None:
        threading.Event().wait(0.5)
        super().read_batch(indices, out, random)


@pytest.mark.parametrize("over", [alone, preloaded])
def test_close_waits_for_threads_as_long_as_a_batch_takes_and_leaves_none_behind(over, caplog):
    base = WorkerLoader(SlowBatches(40), 4, num_workers=1, seed=0, persistent_workers=True, worker_method="thread")
    loader = over(base)
    before = set(threading.enumerate())
    next(iter(loader))  # the thread goes on with the second batch
    ours = set(threading.enumerate()) - before
    loader.close()
    assert ours and not any(thread.is_alive() for thread in ours)
    assert "left behind" not in caplog.text


# Workers' exit work


class Exiting(Numbers):
    """A worker's exit work takes most of a second, and then writes a file."""

    def __init__(self, folder: Path, length: int) -> None:
        super().__init__(length)
        self.folder = folder
        self.is_registered = False

    def __getitem__(self, index: int) -> int:
        if not self.is_registered:
            self.is_registered = True
            util.Finalize(None, self.finish, exitpriority=1)
        return index

    def finish(self) -> None:
        threading.Event().wait(0.8)
        (self.folder / str(os.getpid())).touch()


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("seed", "over"), [(0, alone), (None, alone), (0, preloaded)])
def test_workers_finish_their_exit_work_at_the_end_of_their_epoch_or_of_their_loader(seed, over, persistent, tmp_path):
    base = WorkerLoader(Exiting(tmp_path, 40), 4, num_workers=2, seed=seed, persistent_workers=persistent)
    with over(base) as loader:
        iterator = iter(loader)
        workers = {str(process.pid) for process in multiprocessing.active_children()}
        assert len(list(iterator)) == 10
        del iterator
    assert {path.name for path in tmp_path.iterdir()} == workers
    assert len(workers) == 2


class Locking(Numbers):
    """Each sample is read under a lock, and takes a while; but the first, before all others."""

    def __init__(self, length: int, seconds: float = 0.8) -> None:
        super().__init__(length)
        self.seconds = seconds
        self.lock = multiprocessing.Lock()
        self.is_locked, self.has_begun = multiprocessing.Event(), multiprocessing.Event()

    def __getitem__(self, index: int) -> int:
        if index == 0:
            self.has_begun.set()
            return index
        self.has_begun.wait()
        with self.lock:
            self.is_locked.set()
            threading.Event().wait(self.seconds)
            return index


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("last_value", [None, KeyboardInterrupt()])
def test_a_worker_finishes_its_sample_before_it_exits_and_so_releases_its_lock(seed, last_value, bound, monkeypatch):
    monkeypatch.setattr(sys, "last_value", last_value, raising=False)  # in a notebook, perhaps of an hour ago
    with WorkerLoader(Locking(40), 1, num_workers=2, seed=seed) as loader:
        iterator = iter(loader)
        workers = iterator._workers
        assert next(iterator).tolist() == [0]
        assert loader.dataset.is_locked.wait(bound)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert loader.dataset.lock.acquire(timeout=bound)


@pytest.mark.parametrize("seed", [0, None])
def test_after_a_ctrl_c_nobody_waits_for_a_sample(seed, bound):
    with (
        pytest.raises(KeyboardInterrupt),
        WorkerLoader(Locking(40, seconds=60), 1, num_workers=2, seed=seed) as loader,
    ):
        iterator = iter(loader)
        workers = iterator._workers
        assert next(iterator).tolist() == [0]
        assert loader.dataset.is_locked.wait(bound)
        raise KeyboardInterrupt
    assert -signal.SIGKILL in [worker.exitcode for worker in workers]


@pytest.mark.parametrize("seed", [0, None])
def test_workers_whose_loader_only_the_garbage_collector_finds_exit_by_themselves(seed):
    def cycle() -> list:
        loader = WorkerLoader(Numbers(40), 4, num_workers=1, seed=seed)
        iterator = iter(loader)
        workers.extend(iterator._workers)
        cyclic = [loader, iterator, next(iterator)]
        cyclic.append(cyclic)
        return cyclic

    workers: list = []
    cycles = [cycle(), cycle()]  # the second one's worker inherits the socket of the first one's
    del cycles
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_an_error_of_a_worker_keeps_no_loader_alive():
    gc.disable()
    try:
        for _ in WorkerLoader(Faulty(40, 6), 4, num_workers=1):
            pass
    except ValueError:
        pass
    finally:
        gc.enable()
    assert not multiprocessing.active_children()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="a system without pidfd")
def test_a_busy_worker_is_killed_by_its_pidfd_and_not_by_a_number_that_another_process_may_have(monkeypatch, bound):
    def refuse(*arguments):
        raise AssertionError(f"os.kill{arguments}")

    dataset = failing(Noisy, "hang", (0,))
    loader = WorkerLoader(dataset, 1, num_workers=1, seed=0, multiprocessing_context="fork")
    iterator = iter(loader)
    (worker,) = iterator._workers
    assert dataset.hangs.wait(bound)
    monkeypatch.setattr(os, "kill", refuse)
    loader.close()
    worker.join(bound)
    assert worker.exitcode == -signal.SIGKILL
