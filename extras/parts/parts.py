"""Warns of a loss that has another gradient if a batch is trained on in parts: train.accumulate, several processes."""

import logging
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from training.dry_run import divides_batches
from training.no_trace import no_trace
from training.parts import parts_of, rows_of
from training.run import Run
from training.trainer import Trainer

log = logging.getLogger(__name__)

SAMPLES = 8  # that are compared
TOLERANCE = 0.02  # of the gradient's norm: in bf16 it is 0.002 for a ResNet-18, as one sample is rounded differently
SHOWN = 1000  # numbers of each weight's gradient that are compared: there may be billions


class PartsOfBatches:
    """After the first step compares the gradient of eight of its samples with what those of each alone add up to.

    It compares gradients, because the losses of samples are nearly equal before training. It runs no training_step of
    a subclass, which may change weights or draw numbers, but says what it has to return.
    """

    def __init__(self) -> None:
        self._has_compared = False

    def on_step(self, run: Run) -> None:
        trainer = run.trainer
        count = trainer.task.batch_length(run.batch)
        if self._has_compared or not count:
            return
        self._has_compared = True
        if trainer.overrides("train_step") or not divides_batches(trainer):
            return
        if trainer.overrides("training_step"):
            if run.is_main:
                log.warning(
                    "%s.training_step gets parts of a batch (train.accumulate, several processes), and it is not "
                    "checked that its loss is a mean over samples, or over what loss_denominator of the task counts: "
                    "one that divides by weights, or compares samples, is not that of the whole batch "
                    "(docs/cluster.md)",
                    type(trainer).__name__,
                )
            return
        difference = 0.0
        with no_trace(trainer):
            samples = rows_of(trainer.task, run.batch, slice(SAMPLES))
            try:
                difference = relative_difference(trainer, samples)
            except Exception as error:  # it must not reach no_trace
                name = type(trainer.model).__name__
                log.warning("gradients of parts are not compared: in evaluation mode %s raises %r", name, error)
        # The largest of all processes, each of which compares samples of its own: NaN is no difference.
        difference = max((each for each in run.processes.gather(difference) if each >= 0), default=0.0)
        found = "the loss of one sample alone raises an error"
        if difference < math.inf:
            found = f"the gradient of the loss of {min(SAMPLES, count)} samples differs by {difference:.0%} from what "
            found += "the gradients of each add up to"
        if difference > TOLERANCE and run.is_main:
            log.warning(
                "%s: with train.accumulate or several processes it is not that of the whole batch. If the loss "
                "weights or ignores labels, override loss_denominator of the task (docs/cluster.md); if it compares "
                "samples, set train.accumulate=1",
                found,
            )


def relative_difference(trainer: Trainer, batch: dict[str, Any]) -> float:
    """By how much the gradients of single samples differ from that of the batch when they are added up.

    They are weighted as in Trainer.part_weights, but for the batch of this process. It is infinite if a sample alone
    has no loss, as one that compares samples may not; NaN if the batch has no finite gradient.
    """
    task = trainer.task
    count = task.batch_length(batch)
    parts = parts_of(task, batch, count)
    whole = gradient(trainer, batch)
    weights: list[Any] = [task.loss_denominator(part.get(task.label)) for part in parts]
    if weights[0] is None:
        weights = [1.0] * count
    total = 1 if trainer.training_loss_is_sum else sum(weights)
    difference = whole
    try:
        for part, weight in zip(parts, weights, strict=True):
            if weight > 0:  # the mean over no labels is NaN
                difference = difference - gradient(trainer, part) * (weight / total)
    except Exception:
        return math.inf
    return float(difference.norm() / whole.norm().clamp(min=1e-30))


def gradient(trainer: Trainer, batch: dict[str, Any]) -> Tensor:
    """The gradient of the batch's loss, as far as it is compared."""
    weights = [weight for weight in trainer.all_modules.parameters() if weight.requires_grad]
    # Not in fp16: without a scale its gradients may be 0, with one those of a single sample infinite.
    is_fp16 = trainer.scaler.is_enabled()
    autocast = torch.autocast(trainer.device.type, enabled=False) if is_fp16 else nullcontext()
    # The recurrent networks of cudnn need training mode.
    with autocast, torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        loss = trainer.loss_of(batch)
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([part.to_dense().flatten()[:SHOWN] for part in gradients])
