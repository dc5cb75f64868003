"""Learning rate schedules: torch's classes, and `cosine`. `schedule=` chooses one of conf/schedule/."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from data.errors import check_choice
from training.config import ConfigError
from training.targets import build


def cosine(optimizer: Optimizer, warmup_steps: float, total_steps: int) -> LambdaLR:
    """The learning rate rises linearly for `warmup_steps`, and then falls to zero at `total_steps`: half a cosine."""
    warmup_steps = min(warmup_steps, total_steps / 2)

    def share_of_peak(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps))

    return LambdaLR(optimizer, share_of_peak)


def build_schedule(
    section: dict[str, Any], optimizer: Optimizer, steps: int, warmup: float, steps_per_epoch: float
) -> LRScheduler:
    """Builds the schedule of the section `schedule` for one optimizer of a run of `steps` steps.

    The target gets those of total_steps, T_max, total_iters (all the run's length), warmup_steps and max_lr (a number
    per group) that it accepts and the section does not set: in epochs with schedule.every=epoch, else in steps.
    Raises ConfigError for a section that cannot work.
    """
    check_choice("schedule.every", section.get("every", "step"), ("step", "epoch"), ConfigError)
    unit = steps_per_epoch if section.get("every") == "epoch" else 1
    total, warmup = math.ceil(steps / unit), warmup / unit
    rates = [group["lr"] for group in optimizer.param_groups]
    known = {**dict.fromkeys(("total_steps", "T_max", "total_iters"), total), "warmup_steps": warmup, "max_lr": rates}
    arguments = {key: value for key, value in section.items() if key != "every"}
    schedule = build("schedule", arguments, optimizer, optional=known)
    if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(
            f"schedule: {section['_target_']} returned a {type(schedule).__name__}: return a subclass of torch's "
            "LRScheduler; with schedule=constant a callback's on_evaluation can step one that needs a score"
        )
    return schedule


def step_all(schedules: Iterable[LRScheduler]) -> None:
    for schedule in schedules:
        schedule.step()


def replay(schedule: LRScheduler, steps: int) -> None:
    """Takes the schedule of a new run to where it is after `steps` steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped
        for _ in range(steps):
            schedule.step()
