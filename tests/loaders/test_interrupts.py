"""Ctrl-C or a raising signal handler inside iter(), next() or close(): no batch is lost, and none is wrong.

strikes.py raises at chosen moments; they are spread over all of them, the same in each run. Real signals, which also
wake a waiting next(), come at the end. A preloader's transform works in place.
"""

import multiprocessing
import os
import random
import signal
import sys
import threading
from contextlib import suppress
from itertools import chain

import pytest
from every_loader import make
from example_datasets import Numbers, contents, rows
from strikes import Interrupted, moments_of, struck

from loaders import Preloader, WorkerLoader

BATCHES = 12
KINDS = (Interrupted, KeyboardInterrupt, TimeoutError, OSError, EOFError)  # an alarm's TimeoutError is an Exception
MANY = pytest.mark.parametrize("count", [4, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
SLOW = ("independent", "unseeded persistent", "preloader_over_streams", "a thread over inline")
PRELOADERS = {"a thread": (1, 2), "a thread over inline": (0, 1), "no thread": (1, 0), "no thread over inline": (0, 0)}
LOADERS = [
    "inline",
    "processes",
    "threads",
    "streams",
    "streams_inline",
    "resident",
    *PRELOADERS,
    "unseeded",
    *SLOW[:3],
]
LOADERS = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LOADERS]
# An interrupt that comes inside a finaliser is printed by Python, and goes no further.
pytestmark = [
    pytest.mark.timeout(60),  # a lost batch may be waited for for ever
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def doubled(batch, random):
    """In place: done twice, it would give other numbers."""
    return batch.mul_(2).add_(int(1000 * random.uniform(1)[0]))


def loader_of(name):
    if name in PRELOADERS:
        num_workers, depth = PRELOADERS[name]
        inner = make("inline", Numbers(4 * BATCHES), num_workers=num_workers)
        return Preloader(inner, "cpu", depth, doubled)
    if "unseeded" in name:
        return WorkerLoader(Numbers(4 * BATCHES), 4, num_workers=1, persistent_workers="persistent" in name)
    return make(name, Numbers(4 * BATCHES), shuffle=True)


def epochs_of(name, count):
    """What undisturbed epochs bring."""
    with loader_of(name) as calm:
        return [contents(calm) for _ in range(count)]


def name_epoch(loader, epoch):
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)


def strikes(most, count, seed):
    """Which batch's next() is struck, at which moment, and by what."""
    draw = random.Random(seed)
    for number in range(count):
        batch = draw.randrange(BATCHES)
        moment = 1 + int((number + draw.random()) * most / count)
        yield batch, moment, KINDS[number % len(KINDS)]


@MANY
@pytest.mark.parametrize("name", LOADERS)
def test_after_an_interrupt_inside_next_no_batch_is_lost(name, count):
    expected = epochs_of(name, count + 1)
    with loader_of(name) as loader:
        iterator = iter(loader)
        most = max(moments_of(lambda: next(iterator)) for _ in range(BATCHES - 1))
        for epoch, (place, moment, kind) in enumerate(strikes(most, count, name)):
            name_epoch(loader, epoch)
            seen = go_on(iter(loader), place, moment, kind)
            if epoch % 2 == 0:  # the same iterator goes on
                assert contents(seen) == expected[epoch]
            else:  # a fresh one begins
                del seen
                name_epoch(loader, epoch + 1)
                assert contents(loader) == expected[epoch + 1]


def go_on(iterator, place, moment, kind):
    """The batches of an epoch whose next() is struck once; those after it are taken by who asks for them."""
    seen = [next(iterator) for _ in range(place)]
    try:
        with struck(moment, kind):
            for batch in iterator:  # not next(): the strike may come after its return, when the batch is the test's
                seen.append(batch)
                break
    except kind:
        pass
    return chain(seen, iterator)


@MANY
@pytest.mark.parametrize("name", LOADERS)
def test_after_an_interrupt_inside_iter_or_close_the_next_epoch_is_whole(name, count):
    expected = epochs_of(name, 2)
    with loader_of(name) as loader:
        name_epoch(loader, 1)
        most = moments_of(lambda: iter(loader))  # starts the workers
    last = [(0, most - before, Interrupted) for before in (0, 2, 5)]
    for number, (_, moment, kind) in enumerate([*strikes(most, count, name), *last]):
        with loader_of(name) as loader:
            name_epoch(loader, 1)
            if number % 2:
                next(iter(loader))
                name_epoch(loader, 1)
            try:
                with struck(moment, kind):
                    iter(loader)
                name_epoch(loader, 1)  # it was not struck: a moment less than before
            except kind:
                pass
            assert contents(loader) == expected[1]
            try:
                with struck(1 + moment % 40, kind):
                    loader.close()
            except kind:
                pass


@pytest.mark.parametrize("moment", [20, 60])  # a worker is waited for, and later
@pytest.mark.parametrize("persistent", [False, True])
def test_with_in_order_false_an_interrupt_ends_the_epoch_or_changes_nothing_and_no_sample_comes_twice(
    moment, persistent
):
    settings = {"num_workers": 2, "seed": 0, "in_order": False, "persistent_workers": persistent}
    with WorkerLoader(Numbers(60), 4, **settings) as loader:
        iterator = iter(loader)
        seen = rows(next(iterator) for _ in range(3))
        with pytest.raises(Interrupted), struck(moment):
            seen += rows(iterator)
        try:
            seen += rows(iterator)
            assert len(seen) == 60
        except RuntimeError as error:
            assert "an exception has interrupted this epoch" in str(error)
        assert len(set(seen)) == len(seen)
        loader.set_epoch(0)
        assert sorted(rows(loader)) == list(range(60))


class Signalling(Numbers):
    """Its program gets a signal again and again, at least five times, while next() waits for a sample."""

    def __init__(self, length):
        super().__init__(length)
        self.program = os.getpid()
        self.received = multiprocessing.RawValue("i")

    def __getitem__(self, index):
        first = self.received.value
        while self.received.value < first + 5:
            os.kill(self.program, signal.SIGUSR1)
            threading.Event().wait(0.005)
        return index


@pytest.mark.parametrize("settings", [{}, {"worker_method": "thread", "timeout": 50}, {"seed": 0, "in_order": False}])
def test_what_interrupts_only_the_waiting_leaves_the_workers_to_it_however_often_it_comes(settings):
    dataset = Signalling(12)
    seen = []

    def strike(*_):
        dataset.received.value += 1
        frame = sys._getframe(1)
        if frame.f_code.co_name == "wait":
            raise TimeoutError

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with WorkerLoader(dataset, 3, num_workers=1, **settings) as loader:
            iterator = iter(loader)
            workers = iterator._workers
            while len(seen) < 12:
                with suppress(TimeoutError):
                    seen += next(iterator).tolist()
            assert iterator._workers == workers and loader.stats()["workers"]["deaths"] == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(seen) == list(range(12))
