"""Builds the training, validation and test set of a run, its task and its transforms, and checks the first samples."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from data.augment import Augment
from data.errors import DataError
from data.samples import CHANNELS, Samples
from data.subset import split
from data.transform import Normalize
from loaders import Random, WorkerLoader
from loaders.workers.reader import offers
from training.config import Config, ConfigError
from training.data_spec import DataSpec
from training.preprocessing import mean_and_std, with_preprocessing
from training.targets import build, function_of, target
from training.tasks import Task

log = logging.getLogger(__name__)

LARGE_PIXEL = 20  # normalised pixels are smaller
MOST_TRIED = 100  # samples that are tried, one after the other, until one can be read


class Sets:
    """The datasets, the task and the transforms of a config.

    train, test, val: datasets; val is None without data.val_fraction. first, first_tested: the first training and the
    first test samples as batches, on the host. image_shape: (height, width, channels); None for samples without
    images. images: the names of the inputs that are images. what: "images", or "samples" without images. transform,
    augment: of evaluated batches, and of training batches; None without images. made_seconds: how long the datasets
    took to make their files. Raises ConfigError or DataError for settings, datasets or first samples
    that cannot be used.
    """

    def __init__(self, config: Config) -> None:
        fraction, collate = config.data["val_fraction"], config.data["collate"]
        data, self.preprocessing = with_preprocessing(config)
        if not 0 <= fraction < 1:
            raise ConfigError(f"data.val_fraction={fraction}: give a share of the training set, from 0 to below 1")
        if check := getattr(target(data), "check_run", None):
            check(data, config.device, config.loader.name)
        self.collate: Callable | None = collate and function_of("data.collate", collate)
        train, test = (open_dataset(data, train) for train in (True, False))
        for dataset in (train, test):
            _check_methods(dataset)
        self.name = type(train).__name__
        self.made_seconds = sum(getattr(dataset, "made_seconds", 0.0) for dataset in (train, test))
        self.task = build_task(config.task, train)
        self.train, self.test = (as_samples(dataset, self.task, bool(collate)) for dataset in (train, test))
        self.val = None
        self.first, self.first_tested = self._first_batches(config, [train, test])
        if fraction and len(train) < 2:
            raise ConfigError(f"data.val_fraction={fraction}: there is only one training sample to split")
        if fraction:
            self.train, self.val = split(self.train, fraction)
        self.images = [name for name in self.task.inputs if is_image(self.first[name])]
        self.what = "images" if self.images else "samples"
        images = self.first[self.images[0]] if self.images else None
        self._is_uint8 = images is not None and images.dtype == torch.uint8
        self.image_shape = None if images is None else _image_shape(images)
        if images is not None and not self._is_uint8 and images.max() > LARGE_PIXEL:
            log.warning("images are float32 up to %g: divide them by 255, or return uint8", images.max())
        self.mixes = config.augment["mixup"] > 0 or config.augment["cutmix"] > 0
        self.normalize = self._normalize(train)
        self.transform, self.augment = self._transforms(train, config.augment)
        self.spec = DataSpec.of(train, test, self.image_shape, self.normalize, self._model_options())
        if hasattr(test, "classes"):
            self.spec.check_classes(test, "the test set has")

    def describe(self, config: Config, steps: int) -> str:
        """Describes the data, the loader and the steps of the run in one line."""
        classes = f" of {self.task.label_below} classes" if self.task.label_below else ""
        validation = "" if self.val is None else f"{len(self.val):,} to validate, "
        return (
            f"{self.name}: {len(self.train):,} {self.what}{classes}, {validation}{len(self.test):,} to test; "
            f"loader={config.loader.name}, {config.loader.num_workers} workers; "
            f"{steps:,} steps of {config.train.batch_size} {self.what}, learning rate {config.optim.get('lr')}"
        )

    @property
    def evaluated(self) -> tuple[str, Any]:
        """The set that chooses the best checkpoint: its name in metrics.jsonl, and the dataset."""
        return ("test", self.test) if self.val is None else ("val", self.val)

    def _model_options(self) -> dict[str, int]:
        """The arguments that the network is built with, if it accepts them."""
        options: dict[str, int] = {"num_classes": self.task.num_outputs}
        if self.image_shape is not None:
            height, width, channels = self.image_shape
            options |= {"in_channels": channels, "image_size": min(height, width)}
        return options

    def _first_batches(self, config: Config, sets: list[Any]) -> list[dict[str, Tensor]]:
        """Reads the first samples of the training set and of the test set, and returns a batch of each.

        Reads in a worker process if the loader has them: forked workers would share the files that are opened here.
        """
        in_process = config.loader.num_workers == 0 or config.loader.name in ("resident", "threads")
        samples = FirstSamples(sets, self.task, self.collate is not None, config.loader.on_error == "skip")
        batches = [[0, 2] if len(self.train) > 1 else [0], [1]]  # numbers of FirstSamples: training set, test set
        options: dict[str, Any] = {"collate_fn": self.collate, "num_workers": int(not in_process), "seed": config.seed}
        with WorkerLoader(samples, batch_sampler=batches, **options) as loader:
            first = list(loader)
        for dataset, batch in zip(sets, first, strict=True):
            for name in self.task.inputs:
                if name not in batch:
                    raise ConfigError(f"task.inputs: a batch has no field {name}, only {', '.join(batch)}")
            _check_spec(dataset, self.name, batch)
        return first

    def _normalize(self, train: Any) -> Normalize | None:
        """The normalisation of uint8 images; None for other samples."""
        if self.image_shape is None or not self._is_uint8:
            return None
        channels = self.image_shape[2]
        mean, std = mean_and_std(self.preprocessing, train, channels)
        if mean is None or std is None:
            mean, std = [0.5] * channels, [0.25] * channels
            log.info("%s has no mean and std: images are normalised with 0.5 and 0.25", self.name)
        for name, values, least in (("mean", mean, 0.0), ("std", std, 1e-6)):
            if np.shape(values) != (channels,) or not least <= min(values) <= max(values) <= 1:
                raise DataError(
                    f"{self.name}.{name} is {values}: give {channels} numbers, one per channel, for pixels scaled to "
                    f"0..1: from {least:g} to 1"
                )
        uint8 = [name for name in self.images if self.first[name].dtype == torch.uint8]
        return Normalize(mean, std, fields=uint8)

    def _transforms(self, train: Any, augment: dict[str, float]) -> tuple[Any, Any]:
        """The transform of evaluated batches, and that of training batches."""
        if self.image_shape is None:
            if used := [f"augment.{key}={value}" for key, value in augment.items() if value]:
                raise ConfigError(f"{used[0]}: {self.name} has no images to augment: set it to 0")
            return None, None
        normalize: Any = self.normalize
        if hasattr(train, "transform_on_device"):
            normalize = train.transform_on_device(normalize)
        for key in ("mixup", "cutmix"):
            if augment[key] and (self.task.label_below is None or self.task.label is None):
                raise ConfigError(
                    f"augment.{key}={augment[key]}: it mixes classes: set it to 0, or task=classification"
                )
        if len(self.images) > 1 and (used := [f"augment.{key}={value}" for key, value in augment.items() if value]):
            raise ConfigError(f"{used[0]}: {self.name} has {len(self.images)} images a sample: augment them in it")
        fields: dict[str, Any] = {"image": self.images[0], "label": self.task.label}
        return normalize, Augment(normalize, self.task.num_outputs, **augment | fields)


def open_dataset(section: dict[str, Any], train: bool) -> Any:
    """Builds the training set or the test set of the section `data`. Raises ConfigError or DataError."""
    not_arguments = ("val_fraction", "collate")  # see conf/any_data.yaml
    return build("data", {key: value for key, value in section.items() if key not in not_arguments}, train=train)


def build_task(section: dict[str, Any], dataset: Any) -> Task:
    """Builds the task of the section `task`; its dataset is the training set. Raises ConfigError or DataError."""
    functions: dict[str, Any] = {}
    if section.get("loss") is not None:
        functions["loss"] = function_of("task.loss", section["loss"])
    if section.get("scores"):
        functions["scores"] = {
            name: function_of(f"task.scores.{name}", score) for name, score in section["scores"].items()
        }
    arguments = {key: value for key, value in section.items() if key not in ("loss", "scores", "metrics")}
    task: Task = build("task", arguments, dataset, **functions)
    return task


def as_samples(dataset: Any, task: Task, has_collate: bool) -> Any:
    """Wraps the dataset in Samples, which checks each sample. Returns one that reads whole batches unchanged."""
    if offers(dataset, "read_batch") or offers(dataset, "arrays"):
        return dataset
    samples = Samples(dataset, *_checks(task), has_collate, task.label is not None)
    for name in ("classes", "mean", "std", "labels"):
        if hasattr(dataset, name):
            setattr(samples, name, getattr(dataset, name))
    return samples


class FirstSamples:
    """A dataset of the first sample of each of `datasets`, and then the second sample of the first one.

    skips: a sample that cannot be read is replaced by the next one. Raises DataError for a sample that training cannot
    use.
    """

    def __init__(self, datasets: list[Any], task: Task, has_collate: bool, skips: bool) -> None:
        self.datasets = [Samples(dataset, *_checks(task), has_collate, task.label is not None) for dataset in datasets]
        self.skips = skips

    def __len__(self) -> int:
        return len(self.datasets) + 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        samples, first = self.datasets[number % len(self.datasets)], number // len(self.datasets)
        if number == 1 and not self.skips:  # training samples are augmented at random
            _check_read_batch(samples)
        for index in range(first, min(len(samples), first + MOST_TRIED)):
            try:
                return samples[index]
            except Exception:
                if not self.skips:
                    raise
        raise DataError(f"{samples.name}: none of the first {MOST_TRIED} samples can be read")


def _check_methods(dataset: Any) -> None:
    """Raises DataError for a dataset without samples, or without a method or argument that loaders need."""
    name = type(dataset).__name__
    for method in ("__len__", "__getitem__"):
        if getattr(type(dataset), method, None) in (None, Dataset.__getitem__):
            raise DataError(f"{name} has no {method}: train.py needs a dataset with __len__ and __getitem__")
    if not len(dataset):
        raise DataError(f"{name} has no samples: check the folder or files that data.root names")
    if not offers(dataset, "read_batch"):
        return
    if not callable(getattr(dataset, "sample_spec", None)):
        raise DataError(f"{name} has read_batch and no sample_spec: add it, data/__init__.py says what it returns")
    try:
        inspect.signature(dataset.read_batch).bind(None, None, None)
    except TypeError as error:
        raise DataError(f"{name}.read_batch needs the arguments (self, indices, out, random): {error}") from error


def _checks(task: Task) -> tuple[list[str], int | None]:
    """The names of a sample's fields, and the number of classes that its label is checked against."""
    return ([*task.inputs] if task.label is None else [*task.inputs, task.label]), task.label_below


def is_image(batch: Any) -> bool:
    """Whether a field of a batch has images: uint8 (B, H, W, C), or floats (B, C, H, W), with up to 4 channels."""
    if not isinstance(batch, Tensor) or batch.ndim != 4:
        return False
    return batch.is_floating_point() or (batch.dtype == torch.uint8 and batch.shape[3] in CHANNELS)


def _image_shape(images: Tensor) -> tuple[int, int, int]:
    """(height, width, channels) of a batch of images: uint8 (B, H, W, C), or floats (B, C, H, W)."""
    channels_last = images if images.dtype == torch.uint8 else images.permute(0, 2, 3, 1)
    _, height, width, channels = channels_last.shape
    return height, width, channels


def _check_read_batch(samples: Samples) -> None:
    """Raises DataError if read_batch and __getitem__ differ in the first or the last sample, of a test set."""
    dataset = samples.dataset
    if not offers(dataset, "read_batch") or getattr(dataset, "decode_on", "workers") == "device":
        return
    indices = np.unique([0, len(dataset) - 1])
    wanted = default_collate([samples[int(index)] for index in indices])
    _check_spec(dataset, samples.name, wanted)
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


def _check_spec(dataset: Any, dataset_name: str, batch: dict[str, Tensor]) -> None:
    """Raises DataError if the shape or dtype of a field in the batch is not the one in the dataset's sample_spec()."""
    if not offers(dataset, "sample_spec"):  # an inherited one may describe other samples
        return
    spec = dataset.sample_spec()
    found = {name: (tuple(value.shape[1:]), value.dtype) for name, value in batch.items() if name in spec}
    for name, (shape, dtype) in spec.items():
        if found.get(name) != (tuple(shape), dtype):
            raise DataError(
                f"{dataset_name}.sample_spec() says that {name!r} is {dtype} {tuple(shape)}, and its first "
                f"sample has {found[name][1] if name in found else 'no such field'} {found.get(name, ('',))[0]}"
            )
