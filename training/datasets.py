"""Builds the training, validation and test set of a run, its task and its transforms."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from data.augment import Augment
from data.errors import DataError
from data.samples import CHANNELS
from data.subset import split
from data.transform import Normalize
from loaders import WorkerLoader, offers
from models.pretrained import Preprocessing
from training.checks import as_checked, check_dataset, check_methods, is_stream
from training.config import Config, ConfigError
from training.data_spec import DataSpec, stored
from training.precision import seed_all
from training.targets import build, function_of, target
from training.tasks import Task

log = logging.getLogger(__name__)

LARGEST_NORMALISED = 20  # a pixel of an image that is normalised is smaller


class Datasets:
    """The datasets, the task and the transforms of a config.

    train, test, val: datasets; val is None without data.val_fraction. first, first_tested: the first training and the
    first test samples as batches, on the host. images: the names of the inputs that are images. what: "images", or
    "samples" without images. transform, augment: of evaluated batches, and of training batches; None without images.
    made_seconds: how long the datasets took to make their files. Raises ConfigError or DataError for settings,
    datasets or first samples that cannot be used.
    """

    def __init__(self, config: Config) -> None:
        fraction, collate = config.data["val_fraction"], config.data["collate"]
        data, preprocessing = with_preprocessing(config)
        if not 0 <= fraction < 1:
            raise ConfigError(f"data.val_fraction={fraction}: give a share of the training set, from 0 to below 1")
        if check := getattr(target(data), "check_run", None):
            check(data, config.device, config.loader.name)
        self.collate: Callable | None = collate and function_of("data.collate", collate)
        train, test = (open_dataset(data, train, config.seed) for train in (True, False))
        self.name = type(train).__name__
        self.made_seconds = sum(getattr(dataset, "made_seconds", 0.0) for dataset in (train, test))
        self.task = build_task(config.task, train)
        self.first, self.first_tested = self._first_batches(config, train, test)
        self.train, self.test = (as_samples(dataset, self.task, bool(collate)) for dataset in (train, test))
        self.val = None
        if fraction:
            if is_stream(train):
                raise ConfigError(
                    f"data.val_fraction={fraction}: {self.name} is a stream, and cannot be split: set it to 0"
                )
            self.train, self.val = split(self.train, fraction)
        self.images = [name for name in self.task.inputs if is_image(self.first[name])]
        self.what = "images" if self.images else "samples"
        self.mixes = config.augment["mixup"] > 0 or config.augment["cutmix"] > 0
        shape, normalize = None, None
        if self.images:
            images = self.first[self.images[0]]
            shape = list((images if images.dtype == torch.uint8 else images.permute(0, 2, 3, 1)).shape[1:])
            normalize = self._normalize(train, preprocessing, shape[2])
        self.transform, self.augment = self._transforms(train, normalize, config.augment)
        model_options = {"num_classes": self.task.num_outputs}  # for the network, if it accepts them
        if shape is not None:
            model_options |= {"in_channels": shape[2], "image_size": min(shape[:2])}
        self.spec = DataSpec(
            model_options,
            classes=[str(name) for name in getattr(train, "classes", ())],
            dataset=stored(test),
            shape=shape,
            mean=list(map(float, normalize.mean)) if normalize else None,
            std=list(map(float, normalize.std)) if normalize else None,
            images=list(normalize.fields) if normalize else [],
        )
        if hasattr(test, "classes"):
            self.spec.check_classes(test, "the test set has")

    def describe(self, config: Config, steps: int) -> str:
        """Describes the data, the loader and the steps of the run in one line."""
        classes = f" of {self.task.label_below} classes" if self.task.label_below else ""
        both = self.train, self.test
        train, test = ("a stream" if is_stream(one) else f"{len(one):,} {self.what}" for one in both)
        validation = "" if self.val is None else f"{len(self.val):,} to validate, "
        return (
            f"{self.name}: {train}{classes}, {validation}{test} to test; loader={config.loader.name}, "
            f"{config.loader.num_workers} workers; {steps:,} steps of {config.train.batch_size} {self.what}"
        )

    def _first_batches(self, config: Config, *datasets: Any) -> list[dict[str, Any]]:
        """Checks the training set and the test set, and returns the first batch of each.

        Reads in a worker process if the loader has them: forked workers would share the files that are opened here.
        A stream is always read there: the samples that are taken here have to come again.
        """
        has_workers = config.loader.num_workers != 0 and config.loader.name not in ("resident", "threads")
        options: Any = {"num_workers": int(has_workers or any(map(is_stream, datasets))), "seed": config.seed}
        skips = config.loader.on_error == "skip"
        calls: Any = [(dataset, self.task, self.collate, dataset is datasets[0], skips) for dataset in datasets]
        with WorkerLoader(calls, batch_size=None, collate_fn=_check, **options) as loader:
            return list(loader)

    def _normalize(self, train: Any, preprocessing: Preprocessing, channels: int) -> Normalize | None:
        """The normalisation of uint8 images; None for float images."""
        uint8 = [name for name in self.images if self.first[name].dtype == torch.uint8]
        images = self.first[self.images[0]]
        if self.images[0] not in uint8:
            if images.max() > LARGEST_NORMALISED:
                log.warning("images are float32 up to %g: divide them by 255, or return uint8", images.max())
            return None
        mean, std = mean_and_std(preprocessing, train, channels)
        if mean is None or std is None:
            mean, std = [0.5] * channels, [0.25] * channels
            log.info("%s has no mean and std: images are normalised with 0.5 and 0.25", self.name)
        for name, values, least in (("mean", mean, 0.0), ("std", std, 1e-6)):
            if np.shape(values) != (channels,) or not least <= min(values) <= max(values) <= 1:
                raise DataError(
                    f"{self.name}.{name} is {values}: give {channels} numbers, one per channel, for pixels scaled to "
                    f"0..1: from {least:g} to 1"
                )
        return Normalize(mean, std, fields=uint8)

    def _transforms(self, train: Any, normalize: Any, augment: dict[str, float]) -> tuple[Any, Any]:
        """The transform of evaluated batches, and that of training batches."""
        used = [f"augment.{key}={value}" for key, value in augment.items() if value]
        if used and len(self.images) != 1:
            raise ConfigError(f"{used[0]}: {self.name} has {len(self.images)} images per sample: set it to 0")
        if self.mixes and (self.task.label_below is None or self.task.label is None):
            raise ConfigError(f"{used[-1]}: it mixes classes: set it to 0, or task=classification")
        if not self.images:
            return None, None
        if hasattr(train, "transform_on_device"):
            normalize = train.transform_on_device(normalize)
        fields: dict[str, Any] = {"image": self.images[0], "label": self.task.label}
        return normalize, Augment(normalize, self.task.num_outputs, **augment | fields)


def _check(call: tuple) -> dict[str, Any]:
    return check_dataset(*call)


def open_dataset(section: dict[str, Any], train: bool, seed: int) -> Any:
    """Builds the training set or the test set of the section `data`. Raises ConfigError or DataError.

    Seeds the global generators first: a dataset that draws from them is the same in each process and script.
    """
    seed_all(seed)
    not_arguments = ("val_fraction", "streaming", "collate")  # see conf/any_data.yaml
    arguments = {key: value for key, value in section.items() if key not in not_arguments}
    if section.get("streaming"):
        arguments["_target_"] += "Stream"
    dataset = build("data", arguments, train=train)
    check_methods(dataset, " for training" if train else " for testing (train=False)")
    return dataset


def build_task(section: dict[str, Any], dataset: Any) -> Task:
    """Builds the task of the section `task`; its dataset is the training set. Raises ConfigError or DataError."""
    functions: dict[str, Any] = {}
    if section.get("loss") is not None:
        functions["loss"] = function_of("task.loss", section["loss"])
    if scores := section.get("scores"):
        functions["scores"] = {name: function_of(f"task.scores.{name}", score) for name, score in scores.items()}
    arguments = {key: value for key, value in section.items() if key not in ("loss", "scores", "metrics")}
    task: Task = build("task", arguments, dataset, **functions)
    return task


def collate_of(dataset: Any, task: Task, collate: Callable | None) -> Callable | None:
    """What makes a batch of the dataset's samples: `collate`, or for a stream one that checks each sample before."""
    if not is_stream(dataset):
        return collate
    samples = as_checked(dataset, task, collate is not None)
    samples.dataset = None  # else it would be sent to workers twice
    return partial(samples.collate, collate=collate or default_collate)


def as_samples(dataset: Any, task: Task, has_collate: bool) -> Any:
    """Wraps the dataset in Samples, which checks each sample. Returns a stream, or one of whole batches, unchanged.

    A collate function needs single samples: with it, no dataset reads whole batches.
    """
    if is_stream(dataset) or (not has_collate and (offers(dataset, "read_batch") or offers(dataset, "arrays"))):
        return dataset
    return as_checked(dataset, task, has_collate)


def with_preprocessing(config: Config) -> tuple[dict[str, Any], Preprocessing]:
    """Returns the section `data`, with the network's values in place of null, and what images the network expects.

    A network's `_target_` may have a function `preprocessing`, as in models/from_timm.py: it takes the keys of the
    section `model`, and returns a Preprocessing without building the network. Raises ConfigError if the network does
    not exist or its description cannot be downloaded.
    """
    if not hasattr(target(config.model), "preprocessing"):
        return config.data, Preprocessing()
    section = {**config.model, "_target_": f"{config.model['_target_']}.preprocessing"}
    preprocessing: Preprocessing = build("model", section)
    values = {key: value for key, value in asdict(preprocessing).items() if value is not None}
    text = ", ".join(f"{key}={value}" for key, value in values.items())
    log.info("the network's preprocessing, used where a key of data is null: %s", text)
    return {key: values.get(key) if value is None else value for key, value in config.data.items()}, preprocessing


def mean_and_std(preprocessing: Preprocessing, dataset: Any, channels: int) -> tuple[Any, Any]:
    """The mean and std of each channel, by which images are normalised.

    Those of the network if it has `channels` of them, else those of the dataset; (None, None) if it has none.
    """
    if preprocessing.mean and len(preprocessing.mean) == channels:
        return preprocessing.mean, preprocessing.std
    return getattr(dataset, "mean", None), getattr(dataset, "std", None)


def is_image(batch: Any) -> bool:
    """Whether a field of a batch has images: uint8 (B, H, W, C), or floats (B, C, H, W), with up to 4 channels."""
    if not isinstance(batch, Tensor) or batch.ndim != 4:
        return False
    return batch.is_floating_point() or (batch.dtype == torch.uint8 and batch.shape[3] in CHANNELS)
