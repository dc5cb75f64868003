"""Short measurements after a run: a step with free data, and a step with the change that the verdict suggests.

The run's weights are saved before, so that these extra training steps do no harm. Each measurement has REPETITIONS
parts, whose spread it gives.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from itertools import islice, pairwise, repeat
from typing import Any

import torch
import yaml

from loaders import LoaderConfig, Preloader
from loaders.machine import available_cores
from loaders.nested import tensors
from training.callbacks.report.measured import Interval
from training.config import CONF
from training.stopping import StopSignals
from training.trainer import Trainer

log = logging.getLogger(__name__)

REPETITIONS = 5
WARM_UP_STEPS, MOST_STEPS = 3, 2000
MOST_BATCHES = 8  # whose sizes are compared
NEVER = Interval.of([math.inf])  # the seconds of a step with a loader that cannot be used
START_SECONDS = 0.5  # steps in the first seconds of a changed loader are not measured
LONGEST = 10  # a measurement is left out if it would take this many times `seconds`
WORKER_TIMEOUT = 5.0  # seconds: a worker of a changed loader that takes longer for a batch is killed


class Trials:
    """Measures the seconds of a training step, for about `seconds` each time.

    make_loader(overrides): gives a training loader with changed settings, and how many batches it loads ahead.
    """

    def __init__(
        self,
        trainer: Trainer,
        signals: StopSignals,
        seconds: float,
        make_loader: Callable[[tuple[str, ...]], AbstractContextManager[tuple[Any, int]]],
    ) -> None:
        self._trainer, self._signals, self._seconds, self._make = trainer, signals, seconds, make_loader
        self._batch: Any = None

    def keep_batch(self, loader: Preloader) -> tuple[int, int]:
        """Keeps the loader's next batch for `free`. Returns how many numbers the smallest and the largest batch have.

        They are counted in the next MOST_BATCHES batches, or in those that arrive within the seconds of a measurement.
        """
        sizes, until = [], time.perf_counter() + self._seconds
        try:
            for batch in islice(loader, MOST_BATCHES if self._seconds else 0):
                self._batch = batch if self._batch is None else self._batch
                sizes.append(sum(tensor.numel() for tensor in tensors(batch)))
                if time.perf_counter() > until:
                    break
        except Exception as error:  # the run itself is complete
            self._ignore(error, "no batch could be kept")
        return min(sizes, default=1), max(sizes, default=1)

    def free(self, step_seconds: float, threads: int | None = None) -> Interval | None:
        """Returns the seconds per step on free data: on the batch that was kept, which is on the device.

        step_seconds: those of the run. threads: CPU threads that compute; None: those of the run. None is returned if
        the measurement would take too long, fails, or is stopped by a signal.
        """
        if self._takes_too_long(WARM_UP_STEPS + REPETITIONS, 0 if threads else step_seconds):
            return None
        try:
            with self._uncounted_steps(), num_threads(threads):
                found = self._measure(repeat(self._batch), WARM_UP_STEPS, 1)
                if found is not None and found != NEVER:  # now it is known how many steps fill the seconds
                    steps = self._steps(max(self._trainer.processes.gather(found.middle)))
                    found = found if steps == 1 else self._measure(repeat(self._batch), WARM_UP_STEPS, steps)
        except Exception as error:
            self._ignore(error, "a step with free data could not be measured")
            return None
        return None if found == NEVER else found

    def change(self, overrides: tuple[str, ...], step_seconds: float) -> Interval | None:
        """Returns the seconds per step with the changed loader, measured after the batches that it loads ahead.

        None if the measurement would take too long; NEVER if the loader cannot be used, or after a signal.
        """
        if self._signals.received:
            return NEVER
        if self._trainer.processes.world_size > 1:  # an error in one process would leave the others waiting
            return None
        try:
            with (
                self._uncounted_steps(),
                _loaders_log_errors_only(),
                warnings.catch_warnings(),
                self._make(overrides) as (loader, ahead),
            ):
                warnings.simplefilter("ignore")  # torch warns of many workers, which the user did not choose
                batches, warm_up = _endless(loader), WARM_UP_STEPS + ahead
                # Workers that finish at the same time deliver their batches in bursts: measure a few bursts.
                steps = max(self._steps(step_seconds), -(-ahead // REPETITIONS))
                if self._takes_too_long(warm_up + max(REPETITIONS, ahead), step_seconds):
                    return None
                started = time.perf_counter() + min(START_SECONDS, self._seconds)
                while time.perf_counter() < started and not self._signals.received:  # workers are still starting
                    self._trainer.train_step(next(batches))
                return self._measure(batches, warm_up, steps)
        except Exception as error:  # the run itself is complete
            log.debug("%s could not be tried: %s", " ".join(overrides), error)
            return NEVER

    def _ignore(self, error: Exception, what: str) -> None:
        if self._trainer.processes.world_size > 1:  # the other processes wait for this one's steps
            raise error
        log.debug("%s: %s", what, error)

    @contextmanager
    def _uncounted_steps(self) -> Iterator[None]:
        """Steps in this block do not count as steps of the run."""
        step = self._trainer.step
        try:
            yield
        finally:
            self._trainer.step = step

    def _takes_too_long(self, steps: int, step_seconds: float) -> bool:
        return not self._seconds or steps * step_seconds > LONGEST * self._seconds

    def _steps(self, step_seconds: float) -> int:
        """How many steps a repetition has, so that all of them take the seconds of a measurement."""
        return max(1, min(MOST_STEPS, int(self._seconds / max(step_seconds, 1e-6))) // REPETITIONS)

    def _measure(self, batches: Iterator[Any], warm_up: int, steps: int) -> Interval | None:
        """Seconds per step, in repetitions of `steps` steps; None if it takes too long, NEVER after a signal."""
        trainer, began, ends = self._trainer, time.perf_counter(), list[float]()
        for number, batch in enumerate(islice(batches, warm_up + REPETITIONS * steps), 1 - warm_up):
            trainer.train_step(batch)
            if number >= 0 and number % steps == 0:
                if trainer.device.type == "cuda":
                    torch.cuda.synchronize(trainer.device)
                ends.append(time.perf_counter())
            is_late = self._takes_too_long(1, time.perf_counter() - began)
            signal, is_late_anywhere = trainer.processes.agree(self._signals.received, int(is_late))
            if signal or is_late_anywhere:
                return NEVER if signal else None
        return Interval.of((end - began) / steps for began, end in pairwise(ends))


@contextmanager
def changed_train_loader(
    config: LoaderConfig,
    make: Callable[[LoaderConfig], Preloader],
    train_loader: Preloader,
    overrides: tuple[str, ...],
) -> Iterator[tuple[Preloader, int]]:
    """A training loader with changed settings, and how many batches it loads ahead; train_loader: the run's own."""
    changed = changed_loader(config, overrides, train_loader.stats().get("workers", {}).get("active_workers"))
    with make(changed) as loader, num_threads(1 if "train.num_threads=1" in overrides else None):
        yield loader, int(changed.num_workers) * int(changed.prefetch_factor) + changed.preload_depth


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """In this block torch computes with `count` CPU threads; None: with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def changed_loader(loader: LoaderConfig, overrides: Iterable[str], workers: int | None = None) -> LoaderConfig:
    """Returns the loader's config with overrides such as loader=prefetch and loader.num_workers=4.

    Another loader keeps the number of workers, if both loaders have workers. `num_workers=auto` becomes `workers`, or
    the number of cores: a search for the best number would disturb the measurement.
    """
    values = asdict(loader)
    for key, _, text in (override.partition("=") for override in overrides):
        value = yaml.safe_load(text)
        if key == "loader":
            preset = yaml.safe_load((CONF / "loader" / f"{value}.yaml").read_text())
            keeps = preset["num_workers"] and values["num_workers"]
            values = preset | ({"num_workers": values["num_workers"]} if keeps else {})
        elif key.startswith("loader."):
            values[key.removeprefix("loader.")] = value
    numbers = {"num_workers": workers or available_cores(), "prefetch_factor": 4}
    values |= {key: number for key, number in numbers.items() if values[key] == "auto"}
    return LoaderConfig(**values | {"timeout": WORKER_TIMEOUT})


@contextmanager
def _loaders_log_errors_only() -> Iterator[None]:
    """Silences the loaders' warnings: the user did not choose the settings that are tried."""
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
