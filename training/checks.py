"""Checks, before the first step, that the samples, the network, the task and the trainer fit together.

`check_dataset` is for your tests too: check_dataset(Plankton(train=True, root="..."), Classification(Plankton)).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset, default_collate

from data.errors import DataError, check_choice
from data.samples import Samples
from loaders import Random, move, offers
from loaders.samplers import own_generator_of
from training.config import ConfigError, one_line
from training.optimizer import parameters_of
from training.tasks import Task

if TYPE_CHECKING:
    from training.datasets import Datasets
    from training.trainer import Trainer

log = logging.getLogger(__name__)

# What calls raise for bad arguments.
ARGUMENT_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
MOST_TRIED = 100  # samples that are tried, one after the other, until one can be read


def check_dataset(
    dataset: Any, task: Task, collate: Callable | None = None, is_random: bool = True, skips: bool = False
) -> dict[str, Any]:
    """Checks that training can use the dataset, and returns a batch of its first two samples, or of its only one.

    dataset: one with __len__ and __getitem__, or a stream. task: such as training.tasks.Classification(dataset).
    collate: makes a batch of a list of samples; None: torch.utils.data.default_collate.
    is_random: whether samples are augmented at random; False: `read_batch` has to write what `__getitem__` returns.
    skips: whether samples that raise an error are left out.
    Raises DataError or ConfigError, which says what does not fit, and what to do.
    """
    check_methods(dataset)
    if is_random and (generator := own_generator_of(dataset)):
        log.warning(
            "%s is a random generator: its numbers depend on the number of workers, and begin anew at a resume; "
            "draw from torch's, Python's or numpy's global generator, which the loader seeds",
            generator,
        )
    samples = as_checked(dataset, task, collate is not None)
    found = [samples.checked(sample) for sample in islice(dataset, 2)] if is_stream(dataset) else []
    for index in range(0 if is_stream(dataset) else min(len(dataset), MOST_TRIED)):
        try:
            found.append(samples[index])
        except Exception:
            if not skips:
                raise
        if len(found) == 2:
            break
    if not found:
        raise DataError(f"{samples.name} has no samples, or none of the first {MOST_TRIED} can be read")
    batch: Any = (collate or default_collate)(found)
    if not hasattr(batch, "keys"):
        raise DataError(f"data.collate returned a {type(batch).__name__}: return a dict of the batch's fields by name")
    for name in task.inputs:
        if name not in batch:
            raise ConfigError(f"task.inputs: a batch has no field {name}, only {', '.join(batch)}")
    if collate:  # the samples are read one by one
        return batch
    if offers(dataset, "sample_spec"):  # an inherited one may describe other samples
        _check_spec(dataset.sample_spec(), samples.name, batch)
    if offers(dataset, "read_batch") and not is_random and getattr(dataset, "decode_on", "workers") != "device":
        _check_read_batch(samples)
    return batch


def is_stream(dataset: Any) -> bool:
    """Whether the dataset is iterated, as torch decides it, and so has no order or length that a loader can use."""
    return isinstance(dataset, IterableDataset)


def check_methods(dataset: Any, where: str = "") -> None:
    """Raises DataError for a dataset without samples, or without a method that loaders need.

    where: which of the datasets it is, such as " for training".
    """
    if is_stream(dataset):
        return
    name = type(dataset).__name__
    for method in ("__len__", "__getitem__"):
        if getattr(type(dataset), method, None) in (None, Dataset.__getitem__):
            raise DataError(f"{name} has no {method}: train.py needs __len__ and __getitem__, or an IterableDataset")
    if not len(dataset):
        raise DataError(f"{name} has no samples{where}: check the folder or files that it reads")
    if offers(dataset, "read_batch") and not callable(getattr(dataset, "sample_spec", None)):
        raise DataError(f"{name} has read_batch and no sample_spec: add it, data/__init__.py says what it returns")


def as_checked(dataset: Any, task: Task, has_collate: bool) -> Samples:
    """Wraps the dataset in Samples, which checks each sample for the task."""
    names = task.inputs if task.label is None else [*task.inputs, task.label]
    return Samples(dataset, names, task.label_below, has_collate, task.label is not None)


def _check_spec(spec: dict[str, Any], dataset_name: str, batch: dict[str, Any]) -> None:
    """Raises DataError if the shape or dtype of a field in the batch is not the one in the dataset's sample_spec()."""
    for name, (shape, dtype) in spec.items():
        found = (tuple(batch[name].shape[1:]), batch[name].dtype) if name in batch else ("", "no such field")
        if found != (tuple(shape), dtype):
            raise DataError(
                f"{dataset_name}.sample_spec() says that {name!r} is {dtype} {tuple(shape)}, and its first "
                f"sample has {found[1]} {found[0]}"
            )


def _check_read_batch(samples: Samples) -> None:
    """Raises DataError if read_batch and __getitem__ differ in the first or the last sample."""
    dataset, indices = samples.dataset, np.unique([0, len(samples) - 1])
    wanted = default_collate([samples[int(index)] for index in indices])
    _check_spec(dataset.sample_spec(), samples.name, wanted)
    out = {name: torch.full_like(wanted[name], 77) for name in dataset.sample_spec()}  # 77 shows what is not written
    dataset.read_batch(indices, dict(out), Random(0, 0, np.arange(len(indices)), indices))
    for name, found in out.items():
        for row, index in enumerate(indices):
            tolerance = 1e-4 if found.is_floating_point() else 0
            if not torch.allclose(found[row], wanted[name][row], tolerance, tolerance, equal_nan=True):
                raise DataError(
                    f"{samples.name}.read_batch writes another {name!r} for sample {index} than __getitem__ returns: "
                    "loaders prefer read_batch, so make both equal, or remove it"
                )


def check_trainer(trainer: Trainer, data: Datasets) -> None:
    """Passes the first samples of both sets through the network, the loss and the scores.

    A step that a subclass overrides decides itself what it does with outputs: the default one is not checked then.
    Raises DataError or ConfigError if something does not fit, or if there is no score of the name task.metric.
    """
    trainer.model.eval()
    steps = ("training", "training_step", data.first), ("test", "evaluation_step", data.first_tested)
    for split, step, first in steps:
        batch = move(first, lambda tensor: tensor.to(trainer.device))
        batch = batch if data.transform is None else data.transform(batch)
        if trainer.overrides(step):
            continue
        inputs, labels = trainer.inputs_and_labels(batch)
        network, shapes = type(trainer.model).__name__, [tuple(getattr(field, "shape", ())) for field in inputs]
        about = f"model: {network} cannot take inputs of shape {', '.join(map(str, shapes))} (first {split} samples)"
        with _refused(about), torch.no_grad(), trainer.autocast:
            outputs = trainer.model(*inputs)
        trainer.task.check(outputs, labels)
        if split == "training" and isinstance(outputs, Tensor) and isinstance(labels, Tensor | None):
            _check_loss(trainer, outputs, labels, data.mixes)
    name = f"trainer: {type(trainer).__name__}.evaluation_step" if trainer.overrides("evaluation_step") else "task"
    with _refused(f"{name} cannot use the first test samples"), torch.no_grad(), trainer.autocast:
        scores = trainer.evaluation_step(batch)
    for metric in vars(trainer).values():  # an own one of torchmetrics has counted these samples
        if callable(getattr(metric, "compute", None)) and callable(getattr(metric, "reset", None)):
            metric.reset()
    if not isinstance(scores, dict):
        raise ConfigError(f"{name} returned {scores!r}: return the scores by name, such as {{'loss': loss}}")
    metrics = trainer.metrics.names
    trainer.metrics.forget()
    trainer.logged.load_state_dict({})
    if not any(trainer.task.metric.startswith(f"{name}_") for name in metrics):  # compute() may return several
        check_choice("task.metric", trainer.task.metric, [*scores, *metrics], ConfigError)


def check_optimizers(trainer: Trainer) -> None:
    """Raises ConfigError if there are no optimizers, or if one trains a parameter that a checkpoint would not have."""
    given, about = trainer.optimizers, f"trainer: {type(trainer).__name__}.configure_optimizers"
    if not (isinstance(given, list | tuple) and given and all(isinstance(one, Optimizer) for one in given)):
        raise ConfigError(
            f"{about} returned {given!r}: return an optimizer, or a list of some; schedule= makes schedules"
        )
    for name, value in vars(trainer).items():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if any(isinstance(one, nn.Module) for one in several):
            log.warning("trainer: the modules in self.%s are in no checkpoint: use nn.ModuleList or ModuleDict", name)
    saved = {weight for module in (trainer.model, *trainer.others.values()) for weight in module.parameters()}
    if not saved.issuperset(parameters_of(given)):
        raise ConfigError(
            f"{about} trains a parameter that checkpoints would not "
            "have: put it into self.model, or into a module that is an attribute of the trainer"
        )


def warn_of_untrained(trainer: Trainer) -> None:
    """Warns of what the first step has given a gradient, and no optimizer trains: optimizers clear those of theirs."""
    for name, module in {"model": trainer.model, **trainer.others}.items():
        if left := [weight for weight, content in module.named_parameters() if content.grad is not None]:
            log.warning("trainer: no optimizer trains %s of self.%s: pass it in configure_optimizers", left[0], name)


def _check_loss(trainer: Trainer, outputs: Tensor, labels: Any, mixes: bool) -> None:
    """Checks the loss and the scores of the first outputs, also with the labels of mixed images."""
    task = trainer.task
    if labels is not None and len(labels) == task.num_outputs:  # a loss could take samples for outputs, and fail later
        outputs, labels = (torch.cat([tensor, tensor[:1]]) for tensor in (outputs, labels))
    # Mixup and cutmix turn labels into shares of the classes.
    mixed = [nn.functional.one_hot(labels.long().flatten(), task.num_outputs).float()] if mixes else []
    for given in (labels, *mixed):
        about = "no labels" if given is None else f"labels of shape {tuple(given.shape)}, {given.dtype}"
        with _refused(f"task: outputs of shape {tuple(outputs.shape)} and {about}, do not fit the loss or a score"):
            if not task.loss(outputs.requires_grad_(), given).requires_grad:
                raise DataError("task.loss has no gradient: compute it from the outputs, without argmax or item")
            task.scores(outputs.detach(), given)
    if trainer.config.accumulate > 1:
        _warn_of_pairs(trainer, outputs.detach(), labels)


@contextmanager
def _refused(about: str) -> Iterator[None]:
    """Turns an error about an argument in this block into a ConfigError: `about`, and what the error says."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except ARGUMENT_ERRORS as error:
        raise ConfigError(f"{about}: {one_line(error)}") from error


@torch.no_grad()
def _warn_of_pairs(trainer: Trainer, outputs: Tensor, labels: Tensor | None) -> None:
    """Warns if the loss is not the mean of each sample's alone."""
    loss, each_label = trainer.task.loss, repeat(None) if labels is None else labels.split(1)
    with suppress(*ARGUMENT_ERRORS):  # a loss may need several samples
        alone = torch.stack(list(map(loss, outputs.split(1), each_label))).mean()
        if not torch.isclose(loss(outputs, labels), alone, rtol=1e-3, atol=1e-5):
            log.warning(
                f"train.accumulate={trainer.config.accumulate} changes what is trained: the loss of a batch is not "
                "the mean of its parts' losses, as for a loss over pairs of samples"
            )
