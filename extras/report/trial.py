"""Short measurements after a run: a step with free data, and a step with the change that the verdict suggests.

These are extra training steps: the run's weights are put back. Each measurement has REPETITIONS parts, whose spread
it gives.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, islice, pairwise, repeat
from typing import Any

import torch
import yaml

from loaders import Accelerator, LoaderConfig, Preloader, available_cores, tensors
from training.callbacks.report.measured import Interval
from training.config import CONF
from training.metrics import Means
from training.run import Run

log = logging.getLogger(__name__)

REPETITIONS = 5
WARM_UP_STEPS, MOST_STEPS = 3, 2000
NEVER = Interval.of([math.inf])  # the seconds of a step with a loader that cannot be used
START_SECONDS = 0.5  # steps in the first seconds of a changed loader are not measured
LONGEST = 10  # a measurement is left out if it would take this many times `seconds`
WORKER_TIMEOUT = 5.0  # seconds: a worker of a changed loader that takes longer for a batch is killed


class Trials:
    """Measures the seconds of a training step of the run, for about `seconds` each time."""

    def __init__(self, run: Run, seconds: float) -> None:
        self._run, self._trainer, self._seconds = run, run.trainer, seconds
        self._batch: Any = None

    def keep_batch(self, loader: Preloader) -> int:
        """Keeps the loader's next batch for `free`. Returns how many numbers it has; 0 if none will be needed."""
        if self._seconds:
            with self._apart_from_the_run():
                self._batch = next(iter(loader))
        return size_of(self._batch)

    def free(self, step_seconds: float) -> Interval | None:
        """Returns the seconds per step on free data: on the batch that was kept, which is on the device.

        step_seconds: those of the run. None is returned if the measurement would take too long, fails, or is stopped
        by a signal.
        """
        found = None
        if not self._takes_too_long(WARM_UP_STEPS + REPETITIONS, step_seconds):
            with self._apart_from_the_run():
                found = self._measure(repeat(self._batch), WARM_UP_STEPS, 1)
                if found is not None and found != NEVER:  # now it is known how many steps fill the seconds
                    steps = self._steps(max(self._trainer.processes.gather(found.middle)))
                    found = found if steps == 1 else self._measure(repeat(self._batch), WARM_UP_STEPS, steps)
        return None if found == NEVER else found

    def change(self, overrides: tuple[str, ...], step_seconds: float) -> Interval | None:
        """Returns the seconds per step with the changed loader, measured after the batches that it loads ahead.

        None if the measurement would take too long; NEVER if the loader cannot be used, or after a signal.
        """
        if self._trainer.processes.world_size > 1:  # an error in one process would leave the others waiting
            return None
        found: Interval | None = NEVER
        if not self._run.signals.received:
            with self._apart_from_the_run(), self._changed_loader(overrides) as (loader, ahead):
                if self._takes_too_long(WARM_UP_STEPS + ahead + max(REPETITIONS, ahead), step_seconds):
                    return None
                batches = chain.from_iterable(repeat(loader))  # one epoch after the other
                started = time.perf_counter() + min(START_SECONDS, self._seconds)
                while time.perf_counter() < started and not self._run.signals.received:  # workers are still starting
                    self._trainer.train_step(next(batches))
                # Workers that finish at the same time deliver their batches in bursts: measure a few bursts.
                steps = max(self._steps(step_seconds), -(-ahead // REPETITIONS))
                found = self._measure(batches, WARM_UP_STEPS + ahead, steps)
        return found

    @contextmanager
    def _apart_from_the_run(self) -> Iterator[None]:
        """Puts weights and counts back after this block, hides warnings of what is tried, and ends at an error."""
        trainer, loaders = self._trainer, logging.getLogger("loaders")
        step, level = trainer.step, loaders.level
        modules = trainer.model, *trainer.others.values()
        weights = [weight for module in modules for weight in (*module.parameters(), *module.buffers())]
        kept = [weight.detach().to("cpu", copy=True) for weight in weights]  # the device may have no room
        logged, trainer.logged = trainer.logged, Means(trainer.processes)
        loaders.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception as error:  # the run itself is complete
            if trainer.processes.world_size > 1:  # the other processes wait for this one's steps
                raise
            log.debug("a measurement after the run failed: %s", error)
        finally:
            trainer.step = step
            with torch.no_grad():
                for weight, content in zip(weights, kept, strict=True):
                    weight.copy_(content)
            trainer.logged = logged
            loaders.setLevel(level)

    @contextmanager
    def _changed_loader(self, overrides: tuple[str, ...]) -> Iterator[tuple[Preloader, int]]:
        """A training loader with changed settings, and how many batches it loads ahead."""
        workers = self._run.train_loader.stats().get("workers", {}).get("active_workers")
        changed, threads = changed_config(self._run.config.loader, overrides, workers), torch.get_num_threads()
        torch.set_num_threads(1 if "train.num_threads=1" in overrides else threads)
        try:
            with self._run.make_train_loader(changed) as loader:
                yield loader, int(changed.num_workers) * int(changed.prefetch_factor) + changed.preload_depth
        finally:
            torch.set_num_threads(threads)

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
                Accelerator(trainer.device).synchronize()
                ends.append(time.perf_counter())
            is_late = self._takes_too_long(1, time.perf_counter() - began)
            signal, is_late_anywhere = trainer.processes.agree(self._run.signals.received, int(is_late))
            if signal or is_late_anywhere:
                return NEVER if signal else None
        return Interval.of((end - began) / steps for began, end in pairwise(ends))


def size_of(batch: Any) -> int:
    """How many numbers the tensors of a batch have."""
    return sum(tensor.numel() for tensor in tensors(batch))


def changed_config(loader: LoaderConfig, overrides: Iterable[str], workers: int | None = None) -> LoaderConfig:
    """Returns the loader's config with overrides such as loader=prefetch and loader.num_workers=4.

    Another loader keeps the number of workers, if both loaders have workers. `num_workers=auto` becomes `workers`, or
    the number of cores: a search for the best number would disturb the measurement.
    """
    values = asdict(loader)
    for key, _, text in (override.partition("=") for override in overrides):
        if key == "loader":
            preset = yaml.safe_load((CONF / "loader" / f"{text}.yaml").read_text())
            keeps = preset["num_workers"] and values["num_workers"]
            values = preset | ({"num_workers": values["num_workers"]} if keeps else {})
        elif key.startswith("loader."):
            values[key.removeprefix("loader.")] = yaml.safe_load(text)
    numbers = {"num_workers": workers or available_cores(), "prefetch_factor": 4}
    values |= {key: number for key, number in numbers.items() if values[key] == "auto"}
    return LoaderConfig(**values | {"timeout": WORKER_TIMEOUT})
