"""An exception that escapes from a call of the loader, of whatever class and wherever, loses and repeats no batch.

A trace function sends a signal before a line of the code below, chosen by its number, and the handler raises it there:
wherever a signal handler may raise one, and at more places, before and after every message to a worker.
"""

import os
import random
import signal
import sys
from pathlib import Path

import pytest
from example_datasets import Numbers, contents, rows

import loaders.workers
from loaders import WorkerLoader

FOLDER = str(Path(loaders.workers.__file__).parent)
LENGTH, BATCH_SIZE = 60, 4
# Python says so, and goes on, if one is raised in a function that it calls at a fork.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Odd(BaseException):
    """Nobody catches it by its class."""


ERRORS = [KeyboardInterrupt, TimeoutError, RuntimeError, OSError, EOFError, Odd]


class Injection:
    """Calls functions, and raises `error` before the line with the given number that they run in loaders/workers."""

    def __init__(self, error: type[BaseException], line: int) -> None:
        self.error, self.left, self.owner = error, line, os.getpid()
        self.has_raised = False

    def __call__(self, function, *args):
        before, handler = sys.gettrace(), signal.signal(signal.SIGUSR1, self._raise)
        sys.settrace(self._trace)
        try:
            return function(*args)
        finally:
            sys.settrace(before)
            signal.signal(signal.SIGUSR1, handler)

    def _raise(self, number, frame):
        self.has_raised = True
        raise self.error("injected")

    def _trace(self, frame, event, arg):
        if (
            os.getpid() != self.owner
            or not frame.f_code.co_filename.startswith(FOLDER)
            or frame.f_code.co_name == "__del__"
        ):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGUSR1)
        return self._trace


def delivered(loader, injection: Injection, in_iter: bool) -> list:
    """The batches of an epoch, in whose iter() or in one of whose next() an exception is injected."""
    iterator, batches = None, []
    while True:
        try:
            if iterator is None:
                iterator = injection(iter, loader) if in_iter else iter(loader)
            batches.append(next(iterator) if in_iter else injection(next, iterator))
        except StopIteration:
            return batches
        except injection.error as error:
            assert "injected" in str(error)


def check(settings: dict, error: type[BaseException], line: int, in_iter: bool) -> bool:
    with WorkerLoader(
        Numbers(LENGTH), BATCH_SIZE, shuffle=True, seed=0, persistent_workers=True, **settings
    ) as loader:
        expected = contents(WorkerLoader(Numbers(LENGTH), BATCH_SIZE, shuffle=True, seed=0))
        injection = Injection(error, line)
        assert contents(delivered(loader, injection, in_iter)) == expected, (error, line, in_iter)
        loader.set_epoch(0)
        assert contents(loader) == expected, (error, line, in_iter)
        return injection.has_raised


@pytest.mark.parametrize("in_iter", [True, False], ids=["iter", "next"])
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_an_exception_that_escapes_loses_and_repeats_no_batch(method, in_iter):
    draw = random.Random(f"{method} {in_iter}")
    settings = {"num_workers": 2, "worker_method": method}
    raised = sum(check(settings, draw.choice(ERRORS), draw.randint(1, 250), in_iter) for _ in range(12))
    assert raised >= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_500_exceptions_that_escape_lose_and_repeat_no_batch():
    draw = random.Random(0)
    for number in range(500):
        method = draw.choice(["multiprocessing", "multiprocessing", "thread"])
        settings = {
            "num_workers": draw.choice([1, 2]),
            "worker_method": method,
            "prefetch_factor": draw.choice([1, 3]),
        }
        check(settings, draw.choice(ERRORS), draw.randint(1, 900), in_iter=number % 3 == 0)


@pytest.mark.parametrize("line", range(1, 40, 3))
def test_close_can_be_called_again_after_an_exception_in_it(line):
    loader = WorkerLoader(Numbers(LENGTH), BATCH_SIZE, num_workers=2, seed=0)
    next(loader)
    injection = Injection(KeyboardInterrupt, line)
    try:
        injection(loader.close)
    except KeyboardInterrupt:
        loader.close()
    assert injection.has_raised or line > 30


def test_with_in_order_false_an_exception_ends_the_epoch_and_no_sample_comes_twice():
    with WorkerLoader(Numbers(LENGTH), BATCH_SIZE, num_workers=2, seed=0, in_order=False) as loader:
        iterator = iter(loader)
        samples = rows(next(iterator) for _ in range(3))
        with pytest.raises(KeyboardInterrupt):
            Injection(KeyboardInterrupt, 60)(next, iterator)
        with pytest.raises(RuntimeError, match="an exception has interrupted this epoch"):
            next(iterator)
        assert len(set(samples)) == len(samples)
        assert sorted(rows(loader)) == list(range(LENGTH))
