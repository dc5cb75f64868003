"""Free data: how long a training step takes when its batch is on the device already, beside steps with loading.

After the run, a few steps with loading and a few without it take turns, so that another program, or the clock, slows
both alike. Steps without loading train on a batch that was kept. Meanwhile nobody asks the loader for one: it is idle
once it has read ahead. The weights are restored afterwards.
"""

import logging
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any

import torch

from extras.report.peak import share_of_peak
from loaders import Accelerator, Measured, Preloader, StepTimer, core_seconds
from training.no_trace import tensors_put_back
from training.run import Run

log = logging.getLogger(__name__)

TURNS = 8  # each with another batch, so that their range shows how much batches differ
LONGEST = 10  # nothing is measured if that would take this many times as long as it may
MOST_STEPS = 1000  # steps of a turn, at most
MOST_QUEUED = 9  # steps whose queueing time is measured, at most
IDLE_SECONDS = 0.02  # a loader is idle if it computes less than a tenth of this time
MOST_IDLE_SECONDS = 0.5  # how long to wait for that, at most


def measure_free_steps(run: Run, seconds: float, step_seconds: float, device_name: str | None) -> Measured | None:
    """Measures steps with and without loading; all processes have to call it. Closes the training loader.

    seconds: how long to measure. step_seconds: of a step of the run. device_name: torch's, None if it has none.
    Returns None if it would take too long, after a signal, and after an error, of which it warns.
    """
    steps = min(MOST_STEPS, max(1, int(seconds / (2 * TURNS * step_seconds))))
    if 2 * TURNS * steps * step_seconds > LONGEST * seconds:
        return None
    try:
        with tensors_put_back(run.trainer.all_modules):
            run.trainer.model.train()
            turns = take_turns(run, steps)
            run.train_loader.close()  # its workers would take cores from the steps
            if turns is None:
                return None
            loaded, free, batch = turns
            queued = max(1, min(MOST_QUEUED, int(seconds / TURNS / max(free))))
            return Measured(
                free,
                loaded,
                queueing_seconds(run, batch, queued),
                synchronizes(run, batch),
                compiles=bool(run.config.train.compile),
                peak=share_of_peak(run, batch, device_name, step_seconds),
            )
    except Exception as error:  # the run itself is complete
        if run.processes.world_size > 1:  # the other processes wait for this one
            raise
        log.warning("a step with instant loading could not be measured: %s: %s", type(error).__name__, error)
        return None


def take_turns(run: Run, steps: int) -> tuple[list[float], list[float], Any] | None:
    """The seconds of a step in each turn with loading and without it, and a batch; None after a signal."""
    batches = endless(run.train_loader)
    loaded = list[float]()
    free = list[float]()
    for _ in range(TURNS):
        loaded.append(computing_seconds(run, islice(batches, steps)))
        batch = next(batches)
        wait_until_idle()
        free.append(computing_seconds(run, repeat(batch, steps)))
        if any(run.processes.gather(run.signals.received)):
            return None
    return loaded, free, batch


def endless(loader: Preloader) -> Iterator[Any]:
    while True:
        yield from loader


def computing_seconds(run: Run, batches: Iterable[Any]) -> float:
    """Trains on the batches. The mean seconds of a step without its waiting, of the slowest process."""
    timer = StepTimer(run.trainer.device, warmup_steps=0)
    for batch in timer.batches(batches):
        train_step(run, batch)
    total = timer.run()
    return max(run.processes.gather((total.seconds - total.wait_seconds) / total.steps))


def train_step(run: Run, batch: Any) -> None:
    with run.trainer.step_of(batch):
        run.trainer.train_step(batch)


def wait_until_idle() -> None:
    """Waits until neither workers nor threads of this process compute: the loader has read ahead as far as it may."""
    until = time.monotonic() + MOST_IDLE_SECONDS
    computed = IDLE_SECONDS
    while computed > IDLE_SECONDS / 10 and time.monotonic() < until:
        before = core_seconds()
        time.sleep(IDLE_SECONDS)
        after = core_seconds()
        computed = after.own + after.workers - before.own - before.workers


def queueing_seconds(run: Run, batch: Any, steps: int) -> float | None:
    """How long Python takes to queue a step on the idle device, the longest of all processes; None on a CPU.

    Over many steps in a row it would wait, whatever the network: the device's queue fills.
    """
    if run.trainer.device.type == "cpu":
        return None
    accelerator = Accelerator(run.trainer.device)
    seconds = []
    for _ in range(steps):
        accelerator.synchronize()
        began = time.perf_counter()
        train_step(run, batch)
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
