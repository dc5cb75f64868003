"""Free data: how long a training step takes when its batch is already on the device, and how long to queue it.

After the run, some batches of the training loader are kept and trained on. The weights are restored afterwards.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from loaders import Accelerator
from training.run import Run
from training.trainer import Trainer
from training.verdict import Measured

log = logging.getLogger(__name__)

REPETITIONS = 5  # each with another batch, so that their range shows how much batches differ
WARM_UP_STEPS = 2
LONGEST = 10  # nothing is measured if that would take this many times as long as it may
MOST_STEPS = 1000  # steps of a repetition, at most
MOST_QUEUED = 9  # steps whose queueing time is measured, at most


def measure_free_steps(run: Run, seconds: float, step_seconds: float) -> Measured | None:
    """Measures steps with free data; all processes have to call it. None if that would take too long, or has failed.

    seconds: how long to measure. step_seconds: of a step of the run, without waiting. Closes the training loader.
    After a signal it returns None too; of an error it warns.
    """
    if step_seconds * (WARM_UP_STEPS + REPETITIONS) > LONGEST * seconds:
        return None
    try:
        run.train_loader.close()  # its workers would take cores from the steps
        batches = kept_batches(run.batches_to_look_at(REPETITIONS), seconds)
        with weights_put_back(run.trainer):
            free = sorted(measure(run, batches, seconds))
            if not free:
                return None
            queued = max(1, min(MOST_QUEUED, int(seconds / REPETITIONS / free[-1])))
            return Measured(free, queueing_seconds(run, batches, queued), synchronizes(run, batches[0]))
    except Exception as error:  # the run itself is complete
        if run.processes.world_size > 1:  # the other processes wait for this one
            raise
        log.warning("a step with instant loading could not be measured: %s: %s", type(error).__name__, error)
        return None


def kept_batches(source: Generator[Any, None, None], seconds: float) -> list[Any]:
    """What `source` gives in this time, and at least one batch."""
    batches: list[Any] = []
    until = time.perf_counter() + seconds
    with closing(source):
        for batch in source:
            batches.append(batch)
            if time.perf_counter() > until:
                break
    return batches


def measure(run: Run, batches: list[Any], seconds: float) -> list[float]:
    """The mean seconds of a step in each repetition; [] after a signal, or if it would take too long."""
    slowest = max(repeat(run, batches[0], WARM_UP_STEPS), default=float("inf"))
    if slowest * REPETITIONS > LONGEST * seconds:
        return []
    steps = max(1, min(MOST_STEPS, int(seconds / REPETITIONS / slowest)))
    repetitions = [repeat(run, batches[number % len(batches)], steps) for number in range(REPETITIONS)]
    return [statistics.mean(times) for times in repetitions] if all(repetitions) else []


def repeat(run: Run, batch: Any, steps: int) -> list[float]:
    """Trains on the batch. Returns the seconds per step of each process; [] after a signal."""
    began = time.perf_counter()
    for _ in range(steps):
        train_step(run, batch)
    Accelerator(run.trainer.device).synchronize()
    results = run.processes.gather(((time.perf_counter() - began) / steps, run.signals.received))
    return [] if any(signal for _, signal in results) else [taken for taken, _ in results]


def train_step(run: Run, batch: Any) -> None:
    with run.trainer.step_of(batch):
        run.trainer.train_step(batch)


def queueing_seconds(run: Run, batches: list[Any], steps: int) -> float | None:
    """How long Python takes to queue a step on the idle device, the longest of all processes; None on a CPU.

    Over many steps in a row it would wait, whatever the network: the device's queue fills.
    """
    if run.trainer.device.type == "cpu":
        return None
    accelerator = Accelerator(run.trainer.device)
    seconds = []
    for number in range(steps):
        accelerator.synchronize()
        began = time.perf_counter()
        train_step(run, batches[number % len(batches)])
        seconds.append(time.perf_counter() - began)
    accelerator.synchronize()
    return max(run.processes.gather(statistics.median(seconds)))


def synchronizes(run: Run, batch: Any) -> bool:
    """Whether a step itself waits for the device, as .item() does. Only CUDA tells."""
    if run.trainer.device.type != "cuda":
        return False
    earlier = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "called a synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train_step(run, batch)
        finally:
            torch.cuda.set_sync_debug_mode(earlier)
    return bool(waits)


@contextmanager
def weights_put_back(trainer: Trainer) -> Iterator[None]:
    """Trains in the block, and puts weights and buffers back afterwards."""
    modules = trainer.model, *trainer.extra_modules.values()
    weights = [weight for module in modules for weight in (*module.parameters(), *module.buffers())]
    kept = [weight.detach().to("cpu", copy=True) for weight in weights]  # the device may have no room
    trainer.model.train()
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, content in zip(weights, kept, strict=True):
                weight.copy_(content)
