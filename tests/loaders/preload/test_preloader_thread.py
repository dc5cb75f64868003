"""A Preloader's thread: how far it is ahead, what it keeps alive, and how an epoch, a loader and a program end."""

import itertools
import logging
import threading
import weakref

import pytest
import torch
from example_datasets import Noisy, contents

from loaders import WorkerLoader
from loaders.preload.device_copy import DeviceCopier, HostBatch
from loaders.preload.engine import PreloadEngine
from loaders.preload.foreign import ForeignEpoch

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 3])
THREADED = pytest.mark.parametrize("depth", [1, 3])


class Counting:
    """An endless loader that notes how far ahead of the consumer's requests it is asked, and by whom."""

    def __init__(self):
        self.requests = 0
        self.started = 0
        self.lead = []
        self.threads = set()
        self._progress = threading.Condition()

    def __iter__(self):
        return self

    def __next__(self):
        with self._progress:
            self.started += 1
            self.lead.append(self.started - self.requests)
            self.threads.add(threading.current_thread())
            self._progress.notify_all()
        return torch.tensor([self.started])

    def take(self, iterator, bound, ahead):
        """Takes a batch, and waits until the loader has been asked for `ahead` more than were taken."""
        self.requests += 1
        next(iterator)
        with self._progress:
            assert self._progress.wait_for(lambda: self.started >= self.requests + ahead, bound)


@DEPTHS
def test_the_thread_is_ahead_by_depth_batches_and_stats_count_them(make, bound, depth, preloading):
    source = Counting()
    loader = make(source, depth)
    assert set(loader.stats()["preloader"].values()) == {0}
    iterator = iter(loader)
    for _ in range(50):
        source.take(iterator, bound, ahead=depth)
    assert len(preloading()) == bool(depth)
    stats = loader.stats()["preloader"]
    assert (stats["batches"], stats["queued"] in (depth - 1, depth, 0)) == (50, True)
    assert stats["wait_seconds"] > 0
    loader.close()
    assert max(source.lead) == depth
    assert len(source.threads) == 1
    assert (threading.current_thread() in source.threads) == (depth == 0)


@THREADED
def test_a_delivered_batch_is_not_kept_alive_while_the_next_one_is_made(make, blocking, bound, depth):
    loader = make(blocking, depth)
    alive = weakref.ref(next(loader))
    assert blocking.reached.wait(bound)
    assert alive() is None
    blocking.release.set()


@THREADED
def test_close_frees_the_batches_that_were_prepared_and_closes_a_generator(make, bound, depth):
    alive = []
    ended = threading.Event()
    far = threading.Event()

    def batches():
        try:
            for number in itertools.count():
                batch = torch.tensor([number])
                alive.append(weakref.ref(batch))
                if number == depth:
                    far.set()
                yield batch
                del batch
        finally:
            ended.set()

    loader = make(batches(), depth)
    next(loader)
    assert far.wait(bound)
    loader.close()
    loader.close()
    assert ended.is_set()
    assert [batch for batch in alive if batch() is not None] == []
    with pytest.raises(RuntimeError, match="this Preloader is closed"):
        iter(loader)


def test_the_thread_is_not_taken_for_a_training_loops_that_has_ended_though_it_has_its_number(make):
    def epoch():
        torch.manual_seed(0)
        return contents(loader)

    loader = make(WorkerLoader(Noisy(8), 4, seed=0, persistent_workers=True))
    loop = threading.Thread(target=epoch)
    loop.start()
    loop.join()
    first = epoch()
    assert all(epoch() == first for _ in range(20)), "the thread has seeded the global generators"


def test_a_thread_that_begins_when_its_epoch_has_ended_leaves_the_next_epochs_batches_alone():
    copier = DeviceCopier("cpu", None, 2)
    epoch = PreloadEngine(ForeignEpoch(iter([]), lambda: None).iterator(0, 0), copier)
    epoch.end()
    copier._copying.append(HostBatch("a batch that is being copied"))
    epoch.fill()
    assert len(copier._copying) == 1


# Closing


@pytest.mark.timeout(60)
def test_close_ends_a_thread_that_waits_for_its_loader_and_wakes_a_waiting_consumer(
    make, blocking, impatient, in_thread, bound, preloading
):
    loader = make(blocking)
    iterator = iter(loader)
    next(iterator)
    consumer = in_thread(next, iterator)
    assert blocking.reached.wait(bound)
    loader.close()
    assert blocking.closed
    assert preloading() == []
    with pytest.raises(RuntimeError, match="ended this epoch"):
        consumer.result(bound)


@pytest.mark.timeout(60)
def test_close_gives_up_a_thread_that_does_not_come_back_and_says_so(make, blocking, impatient, bound, caplog):
    loader = make(iter(blocking))  # a generator
    next(loader)
    assert blocking.reached.wait(bound)
    with caplog.at_level(logging.WARNING, logger="loaders"):
        loader.close()
    assert "left behind" in caplog.text


NEVER_CLOSED = """
import atexit
import builtins
import sys
import threading
import torch

def clear_names():
    for name in ("loaders.work", "loaders.workers.engine"):
        sys.modules[name].os = None

atexit.register(clear_names)  # before loaders is imported, so that it runs after the loaders were stopped
from loaders import Preloader, WorkerLoader

waits_for_room = iter(Preloader([torch.zeros(1)] * 100, "cpu", 2))
next(waits_for_room)
started = threading.Event()

def silent():
    started.set()
    threading.Event().wait()
    yield

never_answered = iter(Preloader(silent(), "cpu", 2))
started.wait()

class WithoutModules:
    def end(self, unblock):
        threading.is_gone

builtins.outlives_modules = Preloader([], "cpu", 0)
builtins.outlives_modules._engine = WithoutModules()
builtins.iterators = [iter(WorkerLoader(range(100), num_workers=workers, seed=0)) for workers in (0, 1)]
for iterator in builtins.iterators:
    next(iterator)
"""


@pytest.mark.timeout(90)
def test_an_interpreter_exits_at_once_and_without_an_error_though_nothing_was_closed(python):
    done = python.run("-c", NEVER_CLOSED, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
