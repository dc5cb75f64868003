"""Workers that stop or block where the parent would have to wait for them: none of it holds up next() or close()."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

from example_datasets import Numbers, Waiting

from loaders import WorkerLoader
from loaders.workers.process_pool import ProcessPool


def wait_until(condition, bound):
    until = time.monotonic() + bound
    while not condition():
        assert time.monotonic() < until, "what should happen did not"
        threading.Event().wait(0.01)


def is_waiting(pid):
    """Whether the process sleeps, as one does that reads from or writes to a pipe."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


class Texts(Numbers):
    """Each sample is a megabyte of text."""

    def __init__(self, length):
        super().__init__(length)
        self.read = multiprocessing.RawValue("q", 0)

    def __getitem__(self, index):
        self.read.value += 1
        return f"{index:08}" * (1 << 17)


def stopped(loader, bound):
    """The rest of an epoch, its first batch, and its worker, stopped when it has nothing to do."""
    iterator = iter(loader)
    first = next(iterator)
    (worker,) = multiprocessing.active_children()
    wait_until(lambda: loader.dataset.read.value == 8 and is_waiting(worker.pid), bound)
    os.kill(worker.pid, signal.SIGSTOP)
    return iterator, first, worker


def test_a_stopped_worker_is_replaced_after_the_timeout_and_large_objects_arrive_whole(seed, in_thread, bound):
    settings = {"num_workers": 1, "prefetch_factor": 1, "timeout": 1, "collate_fn": list, "seed": seed}
    with WorkerLoader(Texts(16), 4, **settings) as loader:
        iterator, first, _ = stopped(loader, bound)
        batches = [first, *in_thread(list, iterator).result(bound)]
    assert [int(text[:8]) for batch in batches for text in batch] == list(range(16))
    assert all(len(text) == 1 << 20 for batch in batches for text in batch)


def test_a_worker_init_fn_may_take_longer_than_the_start_of_a_worker(in_thread, monkeypatch, bound):
    rounds = []
    events = ProcessPool.events
    monkeypatch.setattr(ProcessPool, "events", lambda pool, news: [rounds.append(0), *events(pool, news)][1:])
    monkeypatch.setattr("loaders.workers.process_pool.LOOK_SECONDS", 0.05)
    begins = multiprocessing.Event()
    go = multiprocessing.Event()

    def set_up(worker):
        begins.set()
        assert go.wait(60)

    with WorkerLoader(Numbers(8), 4, num_workers=1, worker_init_fn=set_up, seed=0) as loader:
        batches = in_thread(list, loader)
        assert begins.wait(bound)
        monkeypatch.setattr("loaders.workers.process_pool.START_SECONDS", 0.0)
        first = len(rounds)
        wait_until(lambda: len(rounds) > first + 2, bound)
        go.set()
        assert len(batches.result(bound)) == 2
        assert loader.stats()["workers"]["deaths"] == 0


def test_a_first_batch_that_is_late_is_a_warning_that_names_the_remedies_and_a_later_one_is_not(
    in_thread, monkeypatch, caplog, bound
):
    monkeypatch.setattr("loaders.workers.process_pool.LATE_SECONDS", 0.2)
    for late in (0, 4):
        with WorkerLoader(Waiting(8, late), 4, num_workers=1, prefetch_factor=1) as loader:
            iterator = iter(loader)
            seen = [next(iterator)] if late else []
            rest = in_thread(list, iterator)
            if late:
                assert loader.dataset.begins.wait(bound)
            else:
                wait_until(lambda: "loader.start_method" in caplog.text, bound)
            loader.dataset.go.set()
            assert len(seen + rest.result(bound)) == 2
    assert caplog.text.count("loader.start_method") == 1
    assert caplog.text.count("make it when a worker reads its first sample") == 1, "a pool cannot be pickled for spawn"
