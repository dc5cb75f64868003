"""Free data: how long a training step takes when its batch is already on the device.

After the run, some batches of the training loader are kept and trained on. The weights are restored afterwards.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loaders import Accelerator, Preloader
from training.run import Run
from training.trainer import Trainer

log = logging.getLogger(__name__)

REPETITIONS = 5  # each with another batch, so that their range shows how much batches differ
WARM_UP_STEPS = 2
LONGEST = 10  # nothing is measured if that would take this many times as long as it may
MOST_STEPS = 1000  # of a repetition


def free_step_seconds(run: Run, seconds: float, step_seconds: float) -> list[float]:
    """Returns the seconds of a step with free data, sorted, one for each repetition; all processes have to call it.

    seconds: how long to measure. step_seconds: of a step of the run, without waiting. Closes the training loader.
    Returns [] if steps take too long for that, after a signal, or after an error, of which it warns.
    """
    if step_seconds * (WARM_UP_STEPS + REPETITIONS) > LONGEST * seconds:
        return []
    try:
        batches = kept_batches(run.train_loader, seconds)
        run.train_loader.close()  # its workers would take cores from the steps
        with weights_put_back(run.trainer):
            return sorted(measure(run, batches, seconds))
    except Exception as error:  # the run itself is complete
        if run.processes.world_size > 1:  # the other processes wait for this one
            raise
        log.warning("a step with free data could not be measured: %s: %s", type(error).__name__, error)
        return []


def kept_batches(loader: Preloader, seconds: float) -> list[Any]:
    """Up to REPETITIONS of the loader's next batches, and at least one."""
    batches, late = list[Any](), time.perf_counter() + seconds
    for batch in loader:
        batches.append(batch)
        if len(batches) == REPETITIONS or time.perf_counter() > late:
            break
    return batches


def measure(run: Run, batches: list[Any], seconds: float) -> list[float]:
    slowest = max(repeat(run, batches[0], WARM_UP_STEPS), default=float("inf"))
    if slowest * REPETITIONS > LONGEST * seconds:
        return []
    steps = max(1, min(MOST_STEPS, int(seconds / REPETITIONS / slowest)))
    found = [repeat(run, batches[number % len(batches)], steps) for number in range(REPETITIONS)]
    return [statistics.mean(times) for times in found] if all(found) else []


def repeat(run: Run, batch: Any, steps: int) -> list[float]:
    """Trains on the batch. Returns the seconds per step of each process; [] after a signal."""
    began = time.perf_counter()
    for _ in range(steps):
        run.trainer.take_step(batch)
    Accelerator(run.trainer.device).synchronize()
    results = run.processes.gather(((time.perf_counter() - began) / steps, run.checkpoints.signals.received))
    return [] if any(signal for _, signal in results) else [taken for taken, _ in results]


@contextmanager
def weights_put_back(trainer: Trainer) -> Iterator[None]:
    """Trains in the block, and puts the step, weights and buffers back afterwards."""
    step = trainer.step
    modules = trainer.model, *trainer.others.values()
    weights = [weight for module in modules for weight in (*module.parameters(), *module.buffers())]
    kept = [weight.detach().to("cpu", copy=True) for weight in weights]  # the device may have no room
    trainer.model.train()
    try:
        yield
    finally:
        trainer.step = step
        with torch.no_grad():
            for weight, content in zip(weights, kept, strict=True):
                weight.copy_(content)
