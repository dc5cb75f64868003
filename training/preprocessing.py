"""What images go through between a dataset and the network: their layout, their mean and std, their transforms."""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data import optional, read_numbers
from data.batch_transform import BatchTransform, Normalize
from data.errors import DataError
from data.subset import undivided
from data.transform import form_of
from loaders import build_loader, can_take_groups, tensors
from training.build import build, function_of, parameters_of, target_of
from training.config import Config, ConfigError, Section
from training.tasks import Batch, Task

log = logging.getLogger(__name__)

MEASURED = 2_000  # training images, for data.mean=auto and data.std=auto


class Preprocessing:
    """How images are made and normalised: as the section data says, or else the checkpoint, or else the network.

    data: the section, of which it takes `mean` and `std`. saved: the `new_images` of the checkpoint, or None.
    values: what the keys of the section that are null become.
    """

    def __init__(self, data: Section, model: Section, saved: dict[str, Any] | None) -> None:
        self._stated = {key: data.pop(key, None) for key in ("mean", "std")}
        numbers = {key: value for key, value in self._stated.items() if value not in (None, "auto")}
        self._typed = {key: read_numbers(value) for key, value in numbers.items()}
        self._is_saved = bool(saved)
        self.values = preprocessing_of(model) | (saved or {}) | self._typed

    def normalize(
        self, dataset: Any, fields: Sequence[str], channels: int, measure: Callable[[str], dict[str, Any]]
    ) -> Normalize | None:
        """Normalises the `fields`, uint8 images (B, H, W, channels); None if there are none.

        The dataset's own mean and std come last. measure: returns those of the images of a field, for `auto`.
        Raises ConfigError, or DataError if the dataset has it, for a mean or std that cannot be used.
        """
        if fields and self._is_saved and "auto" in self._stated.values():
            sentence = "data.mean, data.std: auto measures nothing anew, as the checkpoint has %s and %s"
            log.info(sentence, self.values["mean"], self.values["std"])
        elif fields and "auto" in self._stated.values():
            self.values |= measure(fields[0]) | self._typed
        for key, value in self._stated.items():
            is_used = fields and len(self.values.get(key) or ()) == channels
            if value is not None and not is_used:
                raise ConfigError(
                    f"data.{key}={value}: give null, or for uint8 images (H, W, C), each in a field "
                    "of its own, auto or a number per channel"
                )
        if not fields:
            return None
        numbers: dict[str, Any] = {"mean": [0.5] * channels, "std": [0.25] * channels}
        for key in numbers:
            value = self.values.get(key)
            if value is None or len(value) != channels:
                value = optional(dataset, key)
                if value is not None and len(value) != channels:
                    raise DataError(
                        f"{type(dataset).__name__}.{key} has {len(value)} numbers, and the images have {channels} "
                        "channels: give a number per channel, or rename it if it is of something else"
                    )
            if value is not None:
                numbers[key] = value
        if min(numbers["std"]) <= 0:
            is_own = numbers["std"] is not self.values.get("std")
            source = f"{type(undivided(dataset)).__name__}.std" if is_own else "data.std"
            raise ConfigError(
                f"{source}={[*numbers['std']]}: images are divided by it, so give numbers above 0, such as 1 for a "
                "channel that is the same in all images"
            )
        return Normalize(**numbers, fields=fields)


def preprocessing_of(section: Section) -> dict[str, Any]:
    """How a pretrained network expects its images, if its target is a function that has a function `preprocessing`."""
    target = target_of("model", section).func
    if not (inspect.isfunction(target) and hasattr(target, "preprocessing")):  # a class may have a method of this name
        return {}
    values = asdict(build("model", {**section, "_target_": f"{section['_target_']}.preprocessing"}))
    log.info("the network's preprocessing, where a key of data is null: %s", values)
    return values


def mean_and_std(config: Config, dataset: Any, task: Task, collate: Callable | None, field: str) -> dict[str, Any]:
    """The mean and std per channel of MEASURED images that the seed chooses, as training has them."""
    settings = replace(config.loader, name="workers")
    order: Any = {"batch_size": 20, "seed": config.seed, "shuffle": True}
    moments = []
    with build_loader(settings, dataset, collate_fn=collate, **order) as loader:
        for batch in islice(loader, MEASURED // 20):
            images = task.to_dict(batch)[field].double() / 255
            moments.append(torch.stack([images, images**2]).mean((2, 3)))
    mean, square = torch.cat(moments, 1).mean(1)
    std = (square - mean**2).clamp(min=1e-6).sqrt()  # of images that are all alike it would be 0
    measured = {"mean": mean.tolist(), "std": std.tolist()}
    log.info("data.mean, data.std: the training images have %s", measured)
    return measured


def batch_transform(
    options: Section, images: Sequence[str], normalize: Normalize | None, task: Task, labels: Sequence[Any] = ()
) -> BatchTransform | Normalize | None:
    """What training batches go through. options: the section augment. images: the names of the fields with images.

    labels: those of training samples, as far as they are known, in arrays.
    """
    own = options.pop("transform", None) or []
    if not own and not any(options.values()):
        return normalize
    if own and (normalize is None or len(images) != 1):
        raise ConfigError("augment.transform needs samples with one image, uint8 (H, W, C), which it normalises")
    mixes = options["mixup"] or options["cutmix"]
    if len(images) != 1 or (mixes and task.label_below is None):
        raise ConfigError("augment: it needs samples with one image, and for mixup and cutmix task=classification")
    ignored = task.ignored
    if mixes and ignored is not None and any(np.any(np.asarray(values) == ignored) for values in labels):
        raise ConfigError(
            f"augment.mixup, augment.cutmix: samples have the label {ignored}, which the loss ignores, so there "
            "are no shares of classes to mix: set both to 0, or train on samples with other labels alone"
        )
    sections = own if isinstance(own, list) else [own]
    functions = [function_of("augment.transform", section) for section in sections]
    fields = {"image": images[0], "label": task.label}
    return BatchTransform(normalize, functions, task.num_outputs, **options, **fields)


class OnNamed:
    """Gives names to the fields of a batch by `task.to_dict`, and then transforms it, unless `transform` is None."""

    def __init__(self, transform: BatchTransform | Normalize | None, task: Task) -> None:
        self.transform = transform
        self._task = task
        names_fields_alone = type(task).to_dict is Task.to_dict  # a task of the user's may do more
        self.takes_groups = names_fields_alone and can_take_groups(transform)

    def __call__(self, batch: Any, random: Any = None) -> Batch:
        named = self._task.to_dict(batch)
        return named if self.transform is None else self.transform(named, random)


def check_layouts(inputs: Batch, model: Section, means: Sequence[Any], has_images: bool) -> None:
    """Checks images that are normalised, or by whose channels the network is built: see `check_layout`.

    model: the section. means: of the channels, as far as they are known. has_images: whether an input is an image.
    """
    parameters = parameters_of(target_of("model", model).func)
    sizes_network = "in_channels" in parameters and "in_channels" not in model
    stated = {len(mean) for mean in means if mean is not None} | {model.get("in_channels")}
    forms = []
    for name, batch in inputs.items():
        is_image = isinstance(batch, Tensor) and batch.ndim == 4
        raw = [part for part in tensors(batch) if part.dtype == torch.uint8 and part.ndim > 3]
        if raw and not is_image:
            log.warning(
                "%r has %s: the network gets these numbers as they are, 0 to 255: only a field of one uint8 image "
                "(H, W, C) per sample is normalised by a mean and a std; return such fields (task.inputs=[one,two]), "
                "or scale them in the network",
                name,
                form_of(raw[0][0]),
            )
        if not isinstance(batch, Tensor):
            forms.append(f"{name!r} is a {type(batch).__name__}")
            continue
        form = f"{name!r} is {form_of(batch[0])}"
        forms.append(form)
        is_uint8 = batch.dtype == torch.uint8
        if is_uint8 or sizes_network:
            check_layout(name, batch.dtype, tuple(batch.shape[1:]), stated)
        if is_uint8 and batch.ndim == 3 and sizes_network and not has_images:
            raise DataError(
                f"{form}: uint8 images have their channels last, (H, W, 1) or (H, W, 3); return them so, or return "
                "another dtype"
            )
    if sizes_network and not has_images and parameters["in_channels"].default is inspect.Parameter.empty:
        found = ", ".join(["no input is an image", *forms])
        raise ConfigError(
            f"the network needs in_channels, and {found}: return uint8 (H, W, C) or floats (C, H, W), such as "
            "image[None], or set +model.in_channels=N"
        )


def check_layout(name: str, dtype: torch.dtype, shape: tuple[int, ...], stated: set[Any]) -> None:
    """Raises DataError unless the channels are where the dtype of an image says: uint8 (H, W, C), floats (C, H, W).

    Its shape has to suggest this more than the other layout: see `hints`.
    stated: how many channels the network or the dataset says that images have; with one of these numbers it may.
    """
    form = f"{name!r} is {str(dtype).removeprefix('torch.')} {shape}"
    if len(shape) != 3:
        return
    first, middle, last = shape
    if_first = hints(first, middle, last)
    if_last = hints(last, first, middle)
    if dtype == torch.uint8:
        if if_last <= if_first and last not in stated:
            raise DataError(
                f"{form}: uint8 images have their channels last, (H, W, C): return image.permute(1, 2, 0), of an "
                "array image.transpose(1, 2, 0), or another dtype; or give the dataset a mean and std of "
                f"{last} numbers, if that is right"
            )
    elif not dtype.is_floating_point:
        raise DataError(f"{form}: images are uint8 (H, W, C), or floats (C, H, W): return one of them")
    elif if_first <= if_last and first not in stated:
        raise DataError(
            f"{form}: float images have their channels first, (C, H, W): return image.permute(2, 0, 1), of an array "
            f"image.transpose(2, 0, 1), or set +model.in_channels={first}, if that is right"
        )


def hints(channels: int, height: int, width: int) -> int:
    """How much suggests that these three sides of an image, in any order, are its channels, height and width."""
    hint = 0
    if channels < min(height, width):
        hint += 2
    if channels in (1, 3, 4):
        hint += 1
    if height == width != channels:
        hint += 1
    return hint


def sizes_of(images: Tensor) -> dict[str, int]:
    """Arguments for the network. images: uint8 (B, H, W, C), or floats (B, C, H, W)."""
    if images.dtype != torch.uint8:
        images = images.permute(0, 2, 3, 1)
    _, height, width, channels = images.shape
    return {"in_channels": channels, "image_size": min(height, width)}
