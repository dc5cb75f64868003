"""Checks, before the first step, that the samples, the network, the task and the trainer fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from data.errors import DataError, check_choice
from loaders.nested import move
from training.config import ARGUMENT_ERRORS, ConfigError, one_line
from training.sets import Sets

if TYPE_CHECKING:
    from training.trainer import Trainer


def check_fit(trainer: Trainer, data: Sets) -> None:
    """Passes the first samples of both sets through the network, the loss and the scores.

    A step that a subclass overrides decides itself what it does with outputs: the default one is not checked then.
    Raises DataError or ConfigError if something does not fit, or if there is no score of the name task.metric.
    """
    trains, evaluates = (not trainer.overrides(step) for step in ("training_step", "evaluation_step"))
    trainer.model.eval()
    if trains or evaluates:
        trainer.first_outputs = outputs, labels = first_outputs(trainer, data, "training", data.first)
        first_outputs(trainer, data, "test", data.first_tested)
    if trains:
        check_loss(trainer, data, outputs, labels)
    batch = prepared(trainer, data, data.first_tested)
    try:
        with torch.no_grad(), trainer.autocast:
            scores = trainer.evaluation_step(batch)
    except (DataError, ConfigError):
        raise
    except ARGUMENT_ERRORS as error:
        name = "task" if evaluates else f"trainer: {type(trainer).__name__}.evaluation_step"
        raise ConfigError(f"{name} cannot use the first test samples: {one_line(error)}") from error
    metrics = trainer.metrics.names
    trainer.metrics.forget()
    names = [*scores, *metrics]
    if not any(trainer.task.metric.startswith(f"{name}_") for name in metrics):  # compute() may return several
        check_choice("task.metric", trainer.task.metric, names, ConfigError)


def prepared(trainer: Trainer, data: Sets, first: dict[str, Any]) -> dict[str, Any]:
    """The first samples as a batch on the device."""
    batch = move(first, lambda tensor: tensor.to(trainer.device))
    return batch if data.transform is None else data.transform(batch)


@torch.no_grad()
def first_outputs(trainer: Trainer, data: Sets, split: str, first: dict[str, Any]) -> tuple[Tensor, Any]:
    """Passes the first samples of a split through the network. Returns outputs and labels, which fit the task."""
    inputs, labels = trainer.inputs_and_labels(prepared(trainer, data, first))
    shapes = ", ".join(str(tuple(getattr(field, "shape", ()))) for field in inputs)
    try:
        with trainer.autocast:
            outputs = trainer.model(*inputs)
    except ARGUMENT_ERRORS as error:
        name = type(trainer.model).__name__
        raise ConfigError(
            f"model: {name} cannot take inputs of shape {shapes}: {one_line(error)} (first {split} samples)"
        ) from error
    trainer.task.check(outputs, labels)
    return outputs, labels


def check_loss(trainer: Trainer, data: Sets, outputs: Tensor, labels: Any) -> None:
    """Checks the loss and the scores of the first outputs, also with the labels of mixed images."""
    task = trainer.task
    if labels is not None and len(labels) == task.num_outputs:  # a loss could take samples for outputs, and fail later
        outputs, labels = (torch.cat([tensor, tensor[:1]]) for tensor in (outputs, labels))
    possible_labels = [labels]
    if data.mixes:  # mixup and cutmix turn labels into shares of the classes
        possible_labels.append(nn.functional.one_hot(labels.long().flatten(), task.num_outputs).float())
    for labels in possible_labels:
        try:
            if not task.loss(outputs.requires_grad_(), labels).requires_grad:
                raise DataError("task.loss has no gradient: compute it from the outputs, without argmax or item")
            task.scores(outputs.detach(), labels)
        except DataError:
            raise
        except ARGUMENT_ERRORS as error:
            about = "no labels" if labels is None else f"labels of shape {tuple(labels.shape)}, {labels.dtype}"
            raise ConfigError(
                f"task: outputs of shape {tuple(outputs.shape)} and {about}, do not fit the loss or a score: "
                f"{one_line(error)}"
            ) from error
