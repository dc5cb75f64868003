"""Ctrl-C, or an alarm's TimeoutError, inside iter() and next(): no batch is lost, none comes twice, none is wrong.

Python runs signal handlers when a function begins and when a call returns. `struck` raises a signal at a given one of
these moments, so that all kinds of them are tried in every run.
"""

import _weakrefset
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from example_datasets import Numbers

import loaders
from loaders import Preloader, WorkerLoader

PACKAGE = str(Path(loaders.__file__).parent)
PYTHONS = threading.__file__, _weakrefset.__file__  # an exception inside Thread.start() breaks Python's own locks
BATCHES = 6
SIGNALS = {signal.SIGINT: KeyboardInterrupt, signal.SIGALRM: TimeoutError}

# An interrupt that comes inside a finaliser is printed by Python, and goes no further.
pytestmark = [
    pytest.mark.timeout(120),  # a lost batch may be waited for for ever
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def an_alarm():
    """An alarm raises TimeoutError."""

    def strike(*_) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, strike)
    yield
    signal.signal(signal.SIGALRM, before)


def doubled(batch: torch.Tensor, random) -> torch.Tensor:
    """In place: done twice, it would give other numbers."""
    return batch.mul_(2).add_(int(1000 * random.uniform(1)[0]))


def loader(depth: int, num_workers: int, seed: int | None = 3, transform=doubled) -> Preloader:
    settings = {"num_workers": num_workers, "seed": seed, "shuffle": seed is not None}
    return Preloader(
        WorkerLoader(Numbers(4 * BATCHES), 4, persistent_workers=num_workers > 0, **settings), "cpu", depth, transform
    )


def is_in_loaders(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


@contextmanager
def struck(moment: int, number: int) -> Iterator[list[None]]:
    """Raises the signal at the given moment, counted from 1, if it comes; yields a list of as many items as came."""
    this, moments = os.getpid(), list[None]()

    def profile(frame: FrameType, event: str, _) -> None:
        if os.getpid() != this:
            sys.setprofile(None)  # a worker that was started meanwhile
        elif event in ("call", "c_return") and frame.f_code.co_filename not in PYTHONS and is_in_loaders(frame):
            moments.append(None)
            if len(moments) == moment:
                sys.setprofile(None)
                signal.raise_signal(number)

    sys.setprofile(profile)
    try:
        yield moments
    finally:
        sys.setprofile(None)


def epoch_of(loader: Preloader, moment: int, number: int) -> list:
    """The batches of an epoch that is struck once; the consumer asks again for what was interrupted."""
    seen: list = []
    iterator = None
    with struck(moment, number):
        while True:
            try:
                iterator = iterator or iter(loader)
                for (
                    batch
                ) in iterator:  # not next(): the strike may come after its return, when the batch is the test's
                    seen.append(batch.tolist())
                return seen
            except SIGNALS[number]:
                pass


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_interrupt_at_any_moment_loses_no_batch_and_changes_none(num_workers, depth, number, count):
    with loader(0, 0) as calm:
        expected = [[batch.tolist() for batch in calm] for _ in range(count + 1)]
    with loader(depth, num_workers) as tried:
        with struck(0, number) as moments:
            list(tried)
        draw = random.Random(f"{depth} {number}")
        for epoch in range(count):
            moment = 1 + int((epoch + draw.random()) * len(moments) / count)
            assert epoch_of(tried, moment, number) == expected[epoch + 1], f"struck at moment {moment}"


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("seed", [3, None])
def test_an_interrupt_in_a_transform_without_a_thread_loses_no_batch(seed, number):
    strikes = [number]

    def struck_once(batch, random):
        prepared = batch + batch if seed is None else batch.mul_(2)
        if strikes and 8 in prepared:
            signal.raise_signal(strikes.pop())
        return prepared

    with loader(0, 2, seed, struck_once) as tried:
        iterator, seen = iter(tried), []
        while len(seen) < BATCHES:
            try:
                seen.append(next(iterator).tolist())
            except SIGNALS[number]:
                state = tried.state_dict()["samples"] if seed is not None else 4 * len(seen)
                assert state == 4 * len(seen)
        assert list(iterator) == strikes == []
    assert sorted(row for batch in seen for row in batch) == list(range(0, 8 * BATCHES, 2))
