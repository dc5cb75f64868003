"""Ctrl-C or a raising signal handler inside next(): the next epoch is right, and no batch is skipped in silence.

Python runs signal handlers when a function begins and when a call returns. `struck` raises at a given one of these
moments, so that all kinds of them are tried in every run. Real signals, which also wake a waiting next(), are tried by
test_like_torch.py (the consumer "alarm") and by clients/test_jupyter.py.
"""

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType

import pytest
from example_datasets import Numbers, contents
from torch.utils.data import sampler

import loaders
from loaders import Preloader, WorkerLoader

PACKAGE = str(Path(loaders.__file__).parent)
SAMPLERS = sampler.__file__
BATCHES = 12
MANY = pytest.mark.parametrize("count", [6, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])

# An interrupt that comes inside a finaliser is printed by Python, and goes no further.
pytestmark = [
    pytest.mark.timeout(60),  # a lost batch may be waited for for ever
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Interrupted(BaseException):
    """What a program's own signal handler raises."""


def loader_over(**settings) -> WorkerLoader:
    settings = {"num_workers": 2, "seed": 3, "shuffle": True, "persistent_workers": True, **settings}
    return WorkerLoader(Numbers(4 * BATCHES), 4, **settings)


TORCHS = {"seed": None, "shuffle": False}
LOADERS = {
    "seeded": loader_over,
    "unseeded": lambda: loader_over(**TORCHS, persistent_workers=False),
    "unseeded persistent": lambda: loader_over(**TORCHS),
    "threads": lambda: loader_over(worker_method="thread"),
    "preloader": lambda: Preloader(loader_over(), "cpu", 2),
}


def epochs_of(kind: str, count: int) -> list[list]:
    """What undisturbed epochs bring."""
    if "unseeded" in kind:
        return [[list(range(start, start + 4)) for start in range(0, 4 * BATCHES, 4)]] * count
    with loader_over(num_workers=0) as calm:
        return [contents(calm) for _ in range(count)]


def name_epoch(loader, epoch: int) -> None:
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)


def is_in_loaders(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def is_in_sampler(frame: FrameType | None) -> bool:
    """Whether a generator of torch's samplers runs, which an exception would end, as under torch's own loader."""
    return frame is not None and frame.f_code.co_filename == SAMPLERS


@contextmanager
def at_moments(do: Callable[[], None]) -> Iterator[None]:
    """Calls `do` whenever, in code of loaders/ or called from there, a signal handler might run."""

    this = os.getpid()

    def profile(frame: FrameType, event: str, _) -> None:
        if os.getpid() != this:
            sys.setprofile(None)  # a worker that was started meanwhile
        elif event in ("call", "c_return") and is_in_loaders(frame) and not is_in_sampler(frame):
            do()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def moments_of(iterator: Iterator) -> int:
    """How many such moments a call of next() has."""
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    with at_moments(add):
        next(iterator)
    return count


@contextmanager
def struck(moment: int) -> Iterator[None]:
    """Raises Interrupted at the given moment, counted from 1, if it comes."""

    def strike() -> None:
        nonlocal moment
        moment -= 1
        if moment == 0:
            sys.setprofile(None)
            raise Interrupted

    with at_moments(strike):
        yield


def strikes(kind: str, count: int) -> Iterator[tuple[int, int]]:
    """Which batch's next() is struck, and at which moment: spread over all of them, the same in each run."""
    with LOADERS[kind]() as loader:
        iterator = iter(loader)
        most = max(moments_of(iterator) for _ in range(BATCHES - 1))
    draw = random.Random(kind)
    for number in range(count):
        yield draw.randrange(BATCHES), 1 + int((number + draw.random()) * most / count)


@MANY
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("goes_on", [True, False], ids=["the same iterator", "a fresh one"])
def test_after_an_interrupt_inside_next_an_iterator_loses_no_batch(kind, goes_on, count):
    expected = epochs_of(kind, count + 1)
    with LOADERS[kind]() as loader:
        for epoch, (place, moment) in enumerate(strikes(kind, count)):
            name_epoch(loader, epoch)
            seen = go_on(iter(loader), place, moment)
            if goes_on:
                assert contents(seen) == expected[epoch]
            else:
                del seen
                name_epoch(loader, epoch + 1)
                assert contents(loader) == expected[epoch + 1]


def go_on(iterator: Iterator, place: int, moment: int) -> Iterator:
    """The batches of an epoch whose next() is struck once; those after it are taken by who asks for them."""
    seen = [next(iterator) for _ in range(place)]
    try:
        with struck(moment):
            for batch in iterator:  # not next(): the strike may come after its return, when the batch is the test's
                seen.append(batch)
                break
    except Interrupted:
        pass
    return chain(seen, iterator)


class Watched(ValueError):
    """While it is made, the program's watchdog strikes."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        signal.raise_signal(signal.SIGUSR1)


class Broken(Numbers):
    def __getitem__(self, index: int):
        raise Watched(index)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("kind", [Interrupted, TimeoutError])
def test_a_signal_while_a_workers_error_is_rebuilt_does_not_replace_it(kind, seed):
    strikes = []

    def strike(*_: object) -> None:
        if multiprocessing.parent_process() is None and len(strikes) < 3:
            strikes.append(kind)
            raise kind

    before, seen = signal.signal(signal.SIGUSR1, strike), []
    try:
        with WorkerLoader(Broken(4), 2, num_workers=1, seed=seed) as loader:
            batches = iter(loader)
            while seen.count(Watched) < 2:
                with pytest.raises(BaseException) as error:
                    next(batches)
                seen.append(error.type)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [kind] * 3 + [Watched] * 2
