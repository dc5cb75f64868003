"""The training, validation and test set of a run, the task that they are for, and a look at their first samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from data.augment import Augment
from data.decode_on_device import DecodeOnDevice
from data.errors import DataError
from data.samples import Samples
from data.subset import split
from data.transform import Normalize
from loaders import WorkerLoader
from training.config import Config, ConfigError, build, function_of
from training.data_spec import DataSpec
from training.preprocessing import mean_and_std, with_preprocessing
from training.tasks import Task

log = logging.getLogger(__name__)

MOST_SKIPPED = 100  # samples that cannot be read, before the first one that can


class Sets:
    """What config.data and config.task describe; `val` is None without data.val_fraction.

    `first`: the first training samples as a batch, on the host. Raises DataError if the task cannot use a sample.
    """

    def __init__(self, config: Config) -> None:
        fraction, collate = config.data["val_fraction"], config.data["collate"]
        data, self.preprocessing = with_preprocessing(config)
        if not 0 <= fraction < 1:
            raise ConfigError(f"data.val_fraction={fraction}: give a share of the training set, from 0 to below 1")
        self.collate: Callable | None = collate and function_of("data.collate", collate)
        train, test = (open_dataset(data, train) for train in (True, False))
        for dataset in (train, test):
            if not hasattr(dataset, "__len__"):
                raise DataError(
                    f"{type(dataset).__name__} has no __len__: train.py needs datasets with __len__ and __getitem__, "
                    "not iterable ones"
                )
            if not len(dataset):
                raise DataError(f"{type(dataset).__name__} has no samples: see what data.root names")
        self.name = type(train).__name__
        self.made_seconds = sum(getattr(dataset, "made_seconds", 0.0) for dataset in (train, test))  # making files
        self.task = build_task(config.task, train)
        self.train, self.test = (as_samples(dataset, self.task, bool(collate)) for dataset in (train, test))
        self.val = None
        self.first = self._first_batch(config)
        if fraction and len(train) < 2:
            raise ConfigError(f"data.val_fraction={fraction}: there is only one training sample to split")
        if fraction:
            self.train, self.val = split(self.train, fraction)
        image = self.first["image"] if "image" in self.task.inputs else None
        # The first images; None if the samples have none.
        self.image = image if isinstance(image, Tensor) and image.ndim == 4 else None
        self.mixes = config.augment["mixup"] > 0 or config.augment["cutmix"] > 0
        self.normalize = self._normalize(train)
        self.transform, self.augment = self._transforms(train, config.augment)
        mean, std = (getattr(self.normalize, name, None) for name in ("mean", "std"))
        self.spec = DataSpec.of(train, self.image, mean, std, self._model_options())

    @property
    def evaluated(self) -> tuple[str, Any]:
        """The set by which the best checkpoint is chosen, and its name in metrics.jsonl."""
        return ("test", self.test) if self.val is None else ("val", self.val)

    def _model_options(self) -> dict[str, int]:
        """What the network is built with, as far as it takes them."""
        options: dict[str, int] = {"num_classes": self.task.num_outputs}
        if self.image is not None:
            bytes_ = self.image.dtype == torch.uint8
            options["in_channels"] = self.image.shape[3 if bytes_ else 1]
            options["image_size"] = min(self.image.shape[1:3] if bytes_ else self.image.shape[2:])
        return options

    def _first_batch(self, config: Config) -> dict[str, Tensor]:
        """Reads the first samples of each set, in a worker if workers read: they would share a file opened here."""
        sets = [self.train, self.test]
        in_process = config.loader.num_workers == 0 or config.loader.name in ("resident", "threads")
        samples = FirstSamples(sets, self.task, self.collate is not None, config.loader.on_error == "skip")
        batches = [[0, 2] if len(self.train) > 1 else [0], [1]]
        options: dict[str, Any] = {"collate_fn": self.collate, "num_workers": int(not in_process), "seed": config.seed}
        with WorkerLoader(samples, batch_sampler=batches, **options) as loader:
            try:
                first, *others = list(loader)
            except RuntimeError as error:
                if "equal size" not in str(error):
                    raise
                raise DataError(
                    f"{self.name}: two samples have different shapes, which cannot be stacked: give them one shape, "
                    "or pad them with 'data.collate={_target_: data.collate.pad}'"
                ) from error
        for dataset, batch in zip(sets, [first, *others], strict=True):
            for name in self.task.inputs:
                if name not in batch:
                    raise ConfigError(f"task.inputs: a batch has no field {name}, only {', '.join(batch)}")
            _check_spec(dataset, self.name, batch)
        return first

    def _normalize(self, train: Any) -> Normalize | None:
        """What images of bytes are normalised with."""
        if self.image is None or self.image.dtype != torch.uint8:
            return None
        channels = self.image.shape[3]
        mean, std = mean_and_std(self.preprocessing, train, channels)
        if mean is None or std is None:
            mean, std = [0.5] * channels, [0.25] * channels
            log.info("%s has no mean and std: images are normalised with 0.5 and 0.25", self.name)
        return Normalize(mean, std)

    def _transforms(self, train: Any, augment: dict[str, float]) -> tuple[Any, Any]:
        """The transform of evaluated batches, and that of training batches."""
        if self.image is None:
            if used := [f"augment.{key}={value}" for key, value in augment.items() if value]:
                raise ConfigError(f"{used[0]}: {self.name} has no images to augment: set it to 0")
            return None, None
        normalize: Any = self.normalize
        if getattr(train, "decode_on", "workers") == "device":
            normalize = DecodeOnDevice(train, normalize)
        for key in ("mixup", "cutmix"):
            if augment[key] and self.task.label_below is None:
                raise ConfigError(
                    f"augment.{key}={augment[key]}: it mixes classes: set it to 0, or task=classification"
                )
        return normalize, Augment(normalize, self.task.num_outputs, **augment)


def open_dataset(section: dict[str, Any], train: bool) -> Any:
    """Makes the training set or the test set of the section `data`. Raises ConfigError or DataError."""
    common = ("val_fraction", "collate")
    return build("data", {key: value for key, value in section.items() if key not in common}, train=train)


def build_task(section: dict[str, Any], dataset: Any) -> Task:
    """Makes the task of the section `task`. Raises ConfigError or DataError."""
    functions: dict[str, Any] = {}
    if section.get("loss") is not None:
        functions["loss"] = function_of("task.loss", section["loss"])
    if section.get("scores"):
        functions["scores"] = {
            name: function_of(f"task.scores.{name}", one) for name, one in section["scores"].items()
        }
    task: Task = build(
        "task", {key: section[key] for key in section if key not in ("loss", "scores")}, dataset, **functions
    )
    return task


def as_samples(dataset: Any, task: Task, has_collate: bool) -> Any:
    """The dataset, with each of its samples checked; one that reads whole batches is left as it is."""
    if callable(getattr(dataset, "read_batch", None)) or callable(getattr(dataset, "arrays", None)):
        return dataset
    samples = Samples(dataset, [*task.inputs, task.label], task.label_below, has_collate)
    for name in ("classes", "mean", "std", "labels", "sample_spec"):
        if hasattr(dataset, name):
            setattr(samples, name, getattr(dataset, name))
    return samples


class FirstSamples:
    """The first sample of each dataset, then the second one of the first dataset; `skips`: the first that can be read.

    Raises DataError for a sample that training cannot use.
    """

    def __init__(self, datasets: list[Any], task: Task, has_collate: bool, skips: bool) -> None:
        checks = [*task.inputs, task.label], task.label_below, has_collate
        self.datasets = [one if isinstance(one, Samples) else Samples(one, *checks) for one in datasets]
        self.skips = skips

    def __len__(self) -> int:
        return len(self.datasets) + 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        samples, first = self.datasets[number % len(self.datasets)], number // len(self.datasets)
        for index in range(first, min(len(samples), first + MOST_SKIPPED)):
            try:
                return samples[index]
            except Exception:
                if not self.skips:
                    raise
        raise DataError(f"{samples.name}: none of the first {MOST_SKIPPED} samples can be read")


def _check_spec(dataset: Any, dataset_name: str, batch: dict[str, Tensor]) -> None:
    """Raises DataError if the dataset's samples are not what its sample_spec() says."""
    if not callable(getattr(dataset, "sample_spec", None)):
        return
    said = dataset.sample_spec()
    found = {name: (tuple(value.shape[1:]), value.dtype) for name, value in batch.items() if name in said}
    for name, (shape, dtype) in said.items():
        if found.get(name) != (tuple(shape), dtype):
            raise DataError(
                f"{dataset_name}.sample_spec() says that {name!r} is {dtype} {tuple(shape)}, and its first "
                f"sample has {found[name][1] if name in found else 'no such field'} {found.get(name, ('',))[0]}"
            )
