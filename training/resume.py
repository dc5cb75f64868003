"""Continues a run from a checkpoint, which has what Trainer.state_dict returned."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from loaders import Preloader
from training.checkpoint import load_others, load_weights
from training.config import ConfigError, changes
from training.optimizer import parameters_of
from training.schedule import replay
from training.trainer import Trainer

log = logging.getLogger(__name__)

STEPS = ("epochs", "max_steps", "warmup_epochs", "batch_size", "steps_per_epoch", "last_batch")
# What a learning rate may depend on.
SCHEDULING = ("optim.", "schedule.", "trainer.", *(f"train.{key} " for key in STEPS))


def resume(trainer: Trainer, path: Path, state: dict[str, Any], loader: Preloader) -> None:
    """Continues from a checkpoint. Raises ConfigError if it does not fit this run.

    With other settings of the optimizers or the schedules, these start at the checkpoint's step with the new
    settings; otherwise they continue with the same bits.
    """
    trainer.spec.check_classes(SimpleNamespace(**state["data_spec"]), f"those of {path} are")
    load_weights(trainer.model, state["model"], path)
    load_others(trainer.others, state.get("others", {}), path)
    trainer.saved_mean = state.get("ema")
    trainer.changed = changes(trainer.settings, state["config"])
    if "frozen" in state and not any(change.startswith("train.freeze ") for change in trainer.changed):
        for name, weight in trainer.model.named_parameters():  # a callback may have frozen or unfrozen it
            weight.requires_grad_(name not in state["frozen"])
    theirs, ours = state["optimizer_classes"], [type(optimizer).__name__ for optimizer in trainer.optimizers]
    if theirs != ours:
        raise ConfigError(
            f"train.resume: {path} was trained with {', '.join(theirs)} and this run has {', '.join(ours)}: use "
            "the same optim="
        )
    trainer.epoch, trainer.step = state["loader"]["epoch"], state["step"]
    for means, sums in zip((trainer.means, trainer.logged), state.get("means", ()), strict=False):
        means.load_state_dict(sums)
    has_new_rates = any(change.startswith(SCHEDULING) for change in trainer.changed)
    try:
        for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
            groups = {"param_groups": optimizer.state_dict()["param_groups"]} if has_new_rates else {}
            optimizer.load_state_dict({**saved, **groups})
        loader.load_state_dict(state["loader"])
        if every := state.get("gradients"):  # of each process
            gradients = every[trainer.processes.rank % len(every)]
            for weight, gradient in zip(parameters_of(trainer.optimizers), gradients, strict=True):
                weight.grad = None if gradient is None else gradient.to(weight)
    except ValueError as error:
        raise ConfigError(
            f"train.resume: {path} does not fit this run: {error}; another folder, or train.resume=null, starts afresh"
        ) from error
    for schedule, saved in zip(trainer.schedules, state["schedules"], strict=True):
        if has_new_rates:
            replay(schedule, trainer.epoch if trainer.by_epoch else trainer.step)
        else:
            schedule.load_state_dict(saved)
    if trainer.scaler.is_enabled() and state["scaler"]:
        trainer.scaler.load_state_dict(state["scaler"])
    trainer.at_epoch_end = trainer.finished or state["loader"]["samples"] == 0
    trainer.epoch += trainer.finished and state["loader"]["samples"] > 0  # train.max_steps ended it
    log.info("resuming after step %d, in epoch %d, from %s", trainer.step, trainer.epoch + 1, path)
    if trainer.changed:
        log.info("train.resume with other settings: %s", "; ".join(trainer.changed))
