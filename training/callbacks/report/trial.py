"""Short measurements after a run: a step with free data, and a step with the change that the verdict suggests.

The run's weights are saved before, so that these extra training steps do no harm.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from itertools import islice, repeat
from typing import Any

import torch
import yaml

from loaders import LoaderConfig, Preloader
from loaders.machine import available_cores
from training.config import CONF
from training.stopping import StopSignals
from training.trainer import Trainer

log = logging.getLogger(__name__)

WARM_UP_STEPS, LEAST_STEPS, MOST_STEPS = 3, 5, 2000
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

    def free(self, step_seconds: float) -> float | None:
        """Returns the seconds per step on free data: on one batch that is already on the device.

        step_seconds: those of the run. None if the measurement would take too long, fails, or is stopped by a signal.
        """
        try:
            with self._uncounted_steps():
                seconds = self._measure(repeat(self._trainer.first_batch), step_seconds, WARM_UP_STEPS, LEAST_STEPS)
        except Exception as error:
            if self._trainer.processes.world_size > 1:  # the other processes wait for this one's steps
                raise
            log.debug("a step with free data could not be measured: %s", error)
            return None
        return None if seconds == math.inf else seconds

    def change(self, overrides: tuple[str, ...], step_seconds: float) -> float | None:
        """Returns the seconds per step with the changed loader, measured after the batches that it loads ahead.

        None if the measurement would take too long; infinity if the loader cannot be used, or after a signal.
        """
        if self._signals.received:
            return math.inf
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
                batches = _endless(loader)
                started = time.perf_counter() + min(START_SECONDS, self._seconds)
                while time.perf_counter() < started and not self._signals.received:  # workers are still starting
                    self._trainer.train_step(next(batches))
                # Workers that finish at the same time deliver their batches in bursts: measure a few bursts.
                return self._measure(batches, step_seconds, WARM_UP_STEPS + ahead, max(LEAST_STEPS, ahead))
        except Exception as error:  # the run itself is complete
            log.debug("%s could not be tried: %s", " ".join(overrides), error)
            return math.inf

    @contextmanager
    def _uncounted_steps(self) -> Iterator[None]:
        """Steps in this block do not count as steps of the run."""
        step = self._trainer.step
        try:
            yield
        finally:
            self._trainer.step = step

    def _measure(self, batches: Iterator[Any], step_seconds: float, warm_up: int, at_least: int) -> float | None:
        """Seconds per step; None if it would take too long, infinity after a signal."""
        if (warm_up + at_least) * step_seconds > LONGEST * self._seconds:
            return None
        trainer, began = self._trainer, 0.0
        counted = max(at_least, min(MOST_STEPS, int(self._seconds / max(step_seconds, 1e-6))))
        for number, batch in enumerate(islice(batches, warm_up + counted)):
            if number == warm_up:
                _wait_for(trainer.device)
                began = time.perf_counter()
            trainer.train_step(batch)
            if trainer.processes.agree(self._signals.received)[0]:
                return math.inf
        _wait_for(trainer.device)
        return (time.perf_counter() - began) / counted


@contextmanager
def changed_train_loader(
    config: LoaderConfig,
    make: Callable[[LoaderConfig], Preloader],
    train_loader: Preloader,
    overrides: tuple[str, ...],
) -> Iterator[tuple[Preloader, int]]:
    """A training loader with changed settings, and how many batches it loads ahead; train_loader: the run's own."""
    workers = train_loader.stats().get("workers", {}).get("active_workers")
    changed, threads = changed_loader(config, overrides, workers), torch.get_num_threads()
    with ExitStack() as cleanup, make(changed) as loader:
        if "train.num_threads=1" in overrides:
            torch.set_num_threads(1)
            cleanup.callback(torch.set_num_threads, threads)
        yield loader, int(changed.num_workers) * int(changed.prefetch_factor) + changed.preload_depth


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


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
