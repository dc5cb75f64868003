"""Runs everything once, on two samples, before the first step: mistakes in names, shapes and dtypes show at once.

It leaves no trace: buffers and sums are as before, and the random generators are seeded anew. A trainer's own
training_step is not run, as it may change weights.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from loaders import Random, move
from training.config import ConfigError
from training.datasets import Datasets
from training.metrics import Means
from training.tasks import DIRECTIONS
from training.trainer import Trainer, evaluating, rows_of

log = logging.getLogger(__name__)


def dry_run(trainer: Trainer, data: Datasets, smallest: int) -> None:
    """Runs the network, the loss, the scores and the metrics on the first samples of the training and the test set.

    smallest: the samples of the smallest part of a batch. If there is a part of one, the network also trains on one.
    Raises ConfigError that says what failed, or if no score has the name task.metric, or its direction is not known.
    """
    metric = trainer.task.metric
    with no_trace(trainer):
        first, tested = move((data.first, data.first_tested), lambda tensor: tensor.to(trainer.device))
        try_training(trainer, data.augment(first, Random(0, 0, 0)), smallest)
        names = try_evaluation(trainer, data.transform(tested))
    if left_out := trainer.metrics.left_out:
        log.warning("task.metrics: %s: not numbers, so they are left out", ", ".join(left_out))
    if metric not in names:
        raise ConfigError(f"task.metric={metric}: it is one of {', '.join(names)}")
    trainer.task.higher_is_better = direction_of(trainer)


def try_training(trainer: Trainer, batch: dict[str, Any], smallest: int) -> None:
    """Runs `training_step`, if it is ours, on the first samples, and on a single one if a part of a batch has one."""
    kind = type(trainer)
    if kind.training_step is not Trainer.training_step or kind.train_step is not Trainer.train_step:
        return
    with naming_batch(f"{names_of(trainer)} cannot use the first training samples", batch):
        trainer.loss_of(batch)
    if smallest <= 1:
        trainer.begin_training()
        sentence = "a batch or a part of it has one sample, on which nothing can train: "
        sentence += "set train.last_batch=drop, or another train.batch_size or train.accumulate"
        with naming_batch(sentence, batch):
            trainer.loss_of(rows_of(batch, slice(1), trainer.task.batch_length(batch)))
        trainer.model.eval()


def try_evaluation(trainer: Trainer, batch: dict[str, Any]) -> list[str]:
    """Evaluates the first test samples. Returns the names of the scores and of the metrics' values."""
    sentence = f"{names_of(trainer)} cannot use the first test samples"
    sentence += f", or {type(trainer).__name__}.evaluation_step returns no scores by name"
    with naming_batch(sentence, batch):
        names = [*trainer.evaluation_step(batch).keys()]
    with naming_batch("task.metrics cannot compute", batch):
        try:
            names += trainer.metrics.compute()
        except (ValueError, RuntimeError) as error:  # torchmetrics raises these for too few samples
            log.warning("task.metrics: compute() failed on the first samples, which may be too few: %s", error)
            if trainer.metrics.metric_of(trainer.task.metric):  # compute() may work on more samples
                names.append(trainer.task.metric)
    return names


def names_of(trainer: Trainer) -> str:
    return f"{type(trainer.model).__name__} and {type(trainer.task).__name__}"


def direction_of(trainer: Trainer) -> bool:
    """Whether a higher task.metric is better: as the task says, the metric itself, or the metric's name."""
    task = trainer.task
    metric = trainer.metrics.metric_of(task.metric)
    for answer in (
        task.higher_is_better,
        getattr(metric, "higher_is_better", None),
        DIRECTIONS.get(task.metric.lower()),
    ):
        if answer is not None:
            return bool(answer)
    raise ConfigError(f"task.metric={task.metric}: say which is the best: task.higher_is_better=true or false")


@contextmanager
def naming_batch(sentence: str, batch: dict[str, Any]) -> Iterator[None]:
    """Turns an error in the block into a ConfigError that says what failed, on which batch, and why."""
    try:
        yield
    except Exception as error:
        fields = []
        for name, value in batch.items():
            kind = getattr(value, "dtype", type(value).__name__)
            fields.append(f"{name}: {kind} {tuple(getattr(value, 'shape', ()))}")
        raise ConfigError(f"{sentence} ({', '.join(fields)}): {type(error).__name__}: {error}") from error


@contextmanager
def no_trace(trainer: Trainer) -> Iterator[None]:
    """Sets evaluation mode in the block. Afterwards restores modes and buffers, and clears sums."""
    modules = [trainer.model, *trainer.extra_modules.values()]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    # Two samples are not worth a minute of compiling.
    eager = torch.compiler.set_stance("force_eager") if trainer.train_config.compile else nullcontext()
    with evaluating(modules), torch.no_grad(), trainer.autocast, eager:
        yield
    for buffer, before in buffers:
        buffer.copy_(before)
    trainer.means = Means(trainer.processes)
    trainer.logged = Means(trainer.processes)
    for value in vars(trainer).values():
        if hasattr(value, "compute") and hasattr(value, "reset"):  # task.metrics, and metrics of a subclass
            value.reset()
    trainer.seed_step()
