"""Short measurements after a run, while its model is still there: free data, and the change that the verdict suggests.

The run's weights are saved by then, so that some more steps harm nothing.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice, repeat
from typing import Any

import torch

from training.stopping import StopSignals
from training.trainer import Trainer

log = logging.getLogger(__name__)

WARM_UP_STEPS, LEAST_STEPS, MOST_STEPS = 3, 5, 2000
START_SECONDS = 0.5  # that the steps of a changed loader are left alone
LONGEST = 10  # a measurement that needs more than so many times the seconds that it may take is left out


class Trials:
    """Measures seconds a step, for about `seconds` each.

    `make_loader(overrides)` makes a training loader, and the number of batches that it loads ahead.
    """

    def __init__(
        self,
        trainer: Trainer,
        signals: StopSignals,
        seconds: float,
        make_loader: Callable[[tuple[str, ...]], AbstractContextManager[tuple[Any, int]]],
    ) -> None:
        self._trainer, self._signals, self._seconds, self._make = trainer, signals, seconds, make_loader

    def free(self, step_seconds: float) -> float | None:
        """A step on a batch that is there already, or None; `step_seconds` is what a step of the run took."""
        try:
            with self._aside():
                seconds = self._measure(repeat(self._trainer.first_batch), step_seconds, WARM_UP_STEPS, LEAST_STEPS)
        except Exception as error:
            if self._trainer.processes.world_size > 1:  # the others wait for this process's steps
                raise
            log.debug("a step with free data could not be measured: %s", error)
            return None
        return None if seconds == math.inf else seconds

    def change(self, overrides: tuple[str, ...], step_seconds: float) -> float | None:
        """A step with the changed loader, after the batches that it loads ahead.

        None if it would take too long to measure; infinity if the loader cannot be used, or after a signal.
        """
        if self._signals.received:
            return math.inf
        if self._trainer.processes.world_size > 1:  # an error in one of them would leave the others waiting
            return None
        try:
            with self._aside(), _quiet(), warnings.catch_warnings(), self._make(overrides) as (loader, ahead):
                warnings.simplefilter("ignore")  # of torch, about a number of workers that nobody gave
                batches = _endless(loader)
                begin = time.perf_counter() + min(START_SECONDS, self._seconds)
                while time.perf_counter() < begin and not self._signals.received:  # not all workers have started
                    self._trainer.train_step(next(batches))
                # Workers that answer in step make bursts of batches: a few bursts have to be measured.
                return self._measure(batches, step_seconds, WARM_UP_STEPS + ahead, max(LEAST_STEPS, ahead))
        except Exception as error:  # the run is done, whatever happens here
            log.debug("%s could not be tried: %s", " ".join(overrides), error)
            return math.inf

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Steps in here do not count as the run's."""
        step = self._trainer.step
        try:
            yield
        finally:
            self._trainer.step = step

    def _measure(self, batches: Iterator[Any], step_seconds: float, uncounted: int, at_least: int) -> float | None:
        if (uncounted + at_least) * step_seconds > LONGEST * self._seconds:
            return None
        trainer, began = self._trainer, 0.0
        counted = max(at_least, min(MOST_STEPS, int(self._seconds / max(step_seconds, 1e-6))))
        for number, batch in enumerate(islice(batches, uncounted + counted)):
            if number == uncounted:
                _wait_for(trainer.device)
                began = time.perf_counter()
            trainer.train_step(batch)
            if trainer.processes.agree(self._signals.received)[0]:
                return math.inf
        _wait_for(trainer.device)
        return (time.perf_counter() - began) / counted


@contextmanager
def _quiet() -> Iterator[None]:
    """What a loader warns of is not said about one that is only tried."""
    loaders = logging.getLogger("loaders")
    level = loaders.level
    loaders.setLevel(logging.ERROR)
    try:
        yield
    finally:
        loaders.setLevel(level)


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
