"""Tries everything on two samples before the first step: mistakes in names, shapes and dtypes show at once.

In this order: the augmentation, twice; a training step without gradients, unless the trainer has its own, which may
change weights; an evaluation; then it looks which weights train, and how task.metric is compared. What it changes is
put back (no_trace.py), but not what augment.transform keeps.

It also finds out whether the loss adds up the samples, or is their mean: parts of a batch are weighted accordingly.
"""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from data import attribute_of
from data.transform import form_of
from loaders import ExpectedError, tensors
from training.checks import are_close, are_equal_batches
from training.config import ConfigError
from training.datasets import Datasets, delivered
from training.metrics import Means, joined
from training.no_trace import no_trace
from training.order import smallest_evaluated
from training.parts import repeated, rows_of
from training.tasks import (
    Batch,
    Task,
    as_float,
    is_better_higher,
    loss_setting,
    name_of_loss,
    without_settings,
)
from training.trained_weights import check_optimized
from training.trainer import Trainer, located

log = logging.getLogger(__name__)

UNREPEATABLE_AUGMENT = (
    "augment.transform gives another batch when the first one is augmented again with the same random numbers, so a "
    "resume differs: it counts its calls, keeps something of earlier batches, or makes a generator of its own, and no "
    "checkpoint has that; draw from the global generators, and let a callback set what changes by run.progress.epoch"
)


def dry_run(trainer: Trainer, data: Datasets, smallest: int) -> None:
    """Runs the network, the loss, the scores and the metrics on the first samples of the training and the test set.

    smallest: how many samples the smallest part of a training batch has.
    Raises ConfigError that says what failed, or if no score has the name task.metric, or its direction is not known.
    """
    metric = trainer.task.metric
    with no_trace(trainer):
        # With the same random numbers at each call.
        batch, again = (delivered(data.first, trainer.device, **data.augment_stage) for _ in range(2))
        if not are_equal_batches(batch, again):
            log.warning(UNREPEATABLE_AUGMENT)
        try_training(trainer, batch, smallest)
    names = dry_run_evaluation(trainer, data, data.val, data.test)
    if None in (trainer.training_loss_is_sum, trainer.evaluation_loss_is_sum):
        log.warning(
            "whether the loss adds up samples is not known, so it is taken for a mean: that of the first ones is 0, "
            "or random in evaluation mode, or they cannot be repeated; a parameter of task.loss, reduction: sum or "
            "mean, says it"
        )
    own_methods = ("train_step", "training_step", "evaluation_step")
    if [trainer.overrides(method) for method in own_methods] == [True, False, False]:  # it may call ours
        trainer.training_loss_is_sum = trainer.evaluation_loss_is_sum
    if trainer.training_loss_is_sum:
        log.info("the loss adds up samples: the gradients are its own, and it is logged divided by their number")
    check_sum(trainer)
    check_optimized(trainer)
    if left_out := trainer.metrics.left_out:
        log.warning(
            "task.metrics: %s: not numbers, so they are left out; a number per class is logged if the metric returns "
            "a dict, as torchmetrics' ClasswiseWrapper does",
            ", ".join(left_out),
        )
    if metric not in names:
        raise ConfigError(f"task.metric={metric}: it is one of {', '.join(names)}")
    trainer.score_names = names
    trainer.task.higher_is_better = direction_of(trainer)


def dry_run_evaluation(trainer: Trainer, data: Datasets, *datasets: Any) -> list[str]:
    """Does what `dry_run` does for evaluation alone. Returns the names of the scores and of the metrics' values.

    datasets: those that will be evaluated; None is left out.
    """
    sizes = [smallest_evaluated(trainer.train_config, each, trainer.processes.world_size) for each in datasets]
    with no_trace(trainer):
        tested = delivered(data.first_tested, trainer.device, transform=data.transform)
        return try_evaluation(trainer, tested, min(sizes))


def try_training(trainer: Trainer, batch: Batch, smallest: int) -> None:
    """Runs `training_step`, if it is ours, on the first samples, and on as many as the smallest part of a batch has.

    First in evaluation mode, to find out whether the loss is a sum; then in training mode.
    """
    if trainer.overrides("training_step") or trainer.overrides("train_step"):
        return
    count = trainer.task.batch_length(batch)
    augment = trainer.settings["augment"]
    mixes = augment["mixup"] or augment["cutmix"]
    shares = ", whose labels are shares of classes (B, classes) by augment.mixup or cutmix" if mixes else ""
    what = f"{names_of(trainer)} cannot use the first training samples"
    with naming_batch(f"{what}{shares}", batch):
        loss, batch = with_enough(trainer, trainer.loss_of, batch, smallest)
    if not math.isfinite(loss):
        log.warning(
            "the loss of the first samples is %s before training: check the initial weights of %s, the loss and these "
            "samples, unless the loss ignores their labels",
            loss.item(),
            type(trainer.model).__name__,
        )
    check_aligned(trainer, batch)
    trainer.training_loss_is_sum = is_sum(trainer, loss, trainer.loss_of, batch)
    trainer.set_training_mode()
    if count > 1:  # batch norm may need two
        with naming_batch(f"{what} in training mode", batch):
            trainer.loss_of(batch)
    sentence = (
        "the network or the loss cannot train on %d sample(s), as in the smallest batch or part of it: "
        "set train.last_batch=drop, or another train.batch_size or train.accumulate"
    )
    try_smallest(trainer, trainer.loss_of, batch, smallest, sentence)


def try_evaluation(trainer: Trainer, batch: Batch, smallest: int) -> list[str]:
    """Evaluates the first test samples, and then as many as the smallest batch has.

    Returns the names of the scores and of the metrics' values.
    """
    what = f"{names_of(trainer)} cannot use the first test samples"
    with naming_batch(f"{what}, or {type(trainer).__name__}.evaluation_step returns no scores by name", batch):
        most = trainer.train_config.part_size
        again, batch = with_enough(trainer, lambda batch: trainer.evaluation_step(dict(batch)), batch, most)
        scores = dict(trainer.evaluation_step(dict(batch)))
        Means(trainer.processes).add(1, scores)  # which refuses what is no number
        names = [*scores]
    if trainer.metrics.by_name and not trainer.metrics.updates:
        log.warning(
            "%s.evaluation_step does not call self.metrics.update(outputs, labels), so that task.metrics (%s) get no "
            "samples, unless it updates each of them itself",
            type(trainer).__name__,
            ", ".join(trainer.metrics.by_name),
        )
    try:
        names = [*joined(scores, trainer.metrics.compute())]
    except ExpectedError as error:
        if not isinstance(error.__cause__, ValueError | RuntimeError):  # torchmetrics raises these for too few samples
            raise
        log.warning("%s; the first samples may be too few to compute it", error)
        if trainer.metrics.metric_of(trainer.task.metric):  # compute() may work on more samples
            names.append(trainer.task.metric)
    check_shapes(trainer, scores, batch)
    # A device may round otherwise from call to call.
    compared = [name for name in scores if name in again]
    if others := [name for name in compared if not are_close(scores[name], again[name], relative=1e-2)]:
        log.warning(
            "%s: other values when the same test samples are evaluated again: one of %s draws random numbers in "
            "evaluation mode, as F.dropout(x) does without training=self.training, or changes itself or the batch",
            ", ".join(others),
            names_of(trainer),
        )
    if "loss" in scores:
        trainer.evaluation_loss_is_sum = is_sum(
            trainer, scores["loss"], lambda batch: trainer.evaluation_step(batch)["loss"], batch
        )
    sentence = (
        "the network, the loss, a score or a metric cannot evaluate %d sample(s), as in the last batch of a test or "
        "validation set: set another train.batch_size or train.accumulate"
    )
    try_smallest(trainer, trainer.evaluation_step, batch, smallest, sentence)
    return names


def naming_batch(what: str, batch: Batch) -> AbstractContextManager[None]:
    """Says with an error of the block what failed, and on which batch."""
    forms = [f"{name}: {form_of(value)}" for name, value in batch.items()]
    remedy = "; networks compute in float32: convert with .astype(np.float32) or .float()"
    has_doubles = any(tensor.dtype == torch.float64 for tensor in tensors(batch))
    return located(f"{what} ({', '.join(forms)}{remedy if has_doubles else ''})", Exception)


def names_of(trainer: Trainer) -> str:
    loss = trainer.task.own_loss
    names = [type(part).__name__ for part in (trainer.model, trainer.task)]
    if loss is not None:
        function = without_settings(loss)
        names.append(f"its loss {getattr(function, '__name__', type(function).__name__)}")
    return " and ".join(names)


def with_enough(trainer: Trainer, step: Callable[[Batch], Any], batch: Batch, most: int) -> tuple[Any, Batch]:
    """The result of a step, and the batch: that of two samples or, if it fails, of these repeated, up to `most`.

    A loss may need more than two, such as one of the k samples with the largest losses. As many samples as outputs are
    repeated first: labels (B,) would fit outputs (B, B) by chance.
    """
    if trainer.task.batch_length(batch) == trainer.task.num_outputs <= most // 2:
        with suppress(Exception):  # some batches cannot be repeated
            batch = repeated(trainer.task, batch, 2)
    try:
        return step(batch), batch
    except Exception as error:
        count = trainer.task.batch_length(batch)
        times = most // max(count, 1)
        fits_by_chance = times * count == trainer.task.num_outputs
        if times > 1 and not fits_by_chance:
            with suppress(Exception):
                longer = repeated(trainer.task, batch, times)
                return step(longer), longer
        raise error


def check_shapes(trainer: Trainer, scores: dict[str, Any], batch: Batch) -> None:
    """Raises ConfigError for a score that grows with the batch in two dimensions: outputs (B, 1) and labels (B,) make
    (B, B), whose mean compares each sample with the labels of all.
    """
    try:
        doubled = trainer.evaluation_step(repeated(trainer.task, batch, 2))
    except Exception:  # is_sum says so
        return
    for name in scores.keys() & doubled.keys():
        shapes = [tuple(getattr(values[name], "shape", ())) for values in (scores, doubled)]
        if len(shapes[0]) > 1 and shapes[0][1:] != shapes[1][1:]:
            raise ConfigError(
                f"the score {name} has the shape {shapes[0]}, and {shapes[1]} for twice as many samples: return a "
                "number per sample, (B,); (B, 1) == (B,) compares each sample with all labels"
            )


def check_aligned(trainer: Trainer, batch: Batch) -> None:
    """Raises ConfigError for a loss that aligns labels which `align_shapes` has aligned already, to (B, B).

    Then the loss of a batch is neither the mean nor the sum of its samples', but is with the dataset's labels.
    """
    task = trainer.task
    if type(task).loss is not Task.loss:  # it aligns by itself
        return
    inputs, labels = trainer.inputs_and_labels(batch)
    outputs = trainer.model(*inputs)
    ours = task.align_shapes(outputs, labels)
    shapes = [tuple(getattr(each, "shape", ())) for each in (labels, ours[1])]
    if shapes[0] == shapes[1]:
        return

    def adds_up(outputs: torch.Tensor, labels: torch.Tensor) -> bool:
        """Whether the samples count on their own; also if it is not known."""
        labels = task.cast_labels(labels).clone()
        # If all are equal, as in a folder of one class, a loss of all pairs is the same as one of the samples.
        if labels.is_floating_point() and (labels == labels[0]).all():
            labels[0] = 1 - labels[0]
        rows = [slice(None), *(slice(at, at + 1) for at in range(len(labels)))]
        whole, *each = (float(task.loss_function(as_float(outputs[row]), labels[row]).mean()) for row in rows)
        return any(math.isclose(whole, sum(each) / count, rel_tol=1e-3) for count in (1, len(each)))

    compares_all = False
    with suppress(Exception):  # a loss may take only whole batches, or only labels like outputs
        compares_all = not adds_up(*ours) and adds_up(outputs, labels)
    if compares_all:
        raise ConfigError(
            f"{name_of_loss(task)} compares each sample with all labels: it gets labels {shapes[1]}, as outputs are, "
            f"not {shapes[0]}, and changes one of the two once more; leave out its squeeze or unsqueeze"
        )


def is_sum(trainer: Trainer, loss: Any, step: Callable[[Batch], Any], batch: Batch) -> bool | None:
    """Whether `step`, which returned `loss` for a batch, adds up the samples: the loss of n copies is n * a + b.

    A mean has a = 0. None: it is not known, as the loss is 0 or draws random numbers, whose mean may grow by chance,
    or the batch cannot be repeated; unless the task's loss has a `reduction`. Two and four copies are compared: if
    each sample is to be told from the others of its batch, the mean loss grows from log 2 to log 4, and to log 8.
    """
    if getattr(loss, "ndim", 0):  # evaluation_step may return a number per sample
        return False
    task = trainer.task
    try:
        single = float(loss)
        double, fourfold, again = (float(step(repeated(task, batch, times))) for times in (2, 4, 4))
    except Exception as error:  # a network may fix the size of its batches
        log.warning("whether the loss adds up samples is not tried, as the first ones cannot be repeated: %s", error)
        single = double = fourfold = again = 0.0
    is_random = not math.isclose(fourfold, again, rel_tol=1e-4)  # a device may round from call to call
    if fourfold == 0 or is_random:  # 0, such as the sum over ignored labels
        reduction = loss_setting(task.own_loss, "reduction")
        return None if reduction is None else reduction == "sum"
    growth = fourfold - double
    # With bf16 a device may choose another kernel for another batch size, whose outputs differ in the third digit.
    return abs(growth) > 0.01 * abs(fourfold) and math.isclose(growth, 2 * (double - single), rel_tol=0.15)


def try_smallest(trainer: Trainer, step: Callable[[Batch], Any], batch: Batch, smallest: int, sentence: str) -> None:
    """Tries a step of as many samples as the smallest batch has, where fewer than those of `batch` may not do."""
    if smallest >= max(2, trainer.task.batch_length(batch)):
        return
    try:
        few = rows_of(trainer.task, batch, slice(max(1, smallest)))
    except Exception as error:
        log.info("a smaller batch is not tried, as the first one cannot be divided: %s", error)
        return
    with naming_batch(sentence % trainer.task.batch_length(few), few):
        step(few)


def check_sum(trainer: Trainer) -> None:
    """Raises ConfigError if a training step that is not ours may return the sum of a part of a batch."""
    has_own_loss = trainer.overrides("training_step") and not trainer.overrides("train_step")
    if has_own_loss and trainer.evaluation_loss_is_sum and divides_batches(trainer):
        raise ConfigError(
            f"the loss of {type(trainer.task).__name__} adds up the samples; with train.accumulate or several "
            f"processes {type(trainer).__name__}.training_step has to return the mean: set reduction=mean in task.loss"
        )


def divides_batches(trainer: Trainer) -> bool:
    return trainer.train_config.accumulate > 1 or trainer.processes.world_size > 1


def direction_of(trainer: Trainer) -> bool:
    """Whether a higher task.metric is better: as the task says, the metric itself, or the metric's name."""
    task = trainer.task
    metric = None if task.metric in task.extra_scores else trainer.metrics.metric_of(task.metric)
    return is_better_higher(task.metric, *(attribute_of(each, "higher_is_better") for each in (task, metric)))
