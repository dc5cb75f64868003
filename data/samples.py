"""Samples: wraps a dataset that reads sample by sample, checks what it returns, and gives names to tuples."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch

from data.errors import DataError

CHANNELS = (1, 2, 3, 4)  # of images; the other sides are larger


class Samples:
    """A dataset of the samples of `dataset` as dicts. Tuples get `names`, (input, ..., label), in this order.

    has_label: whether the last name is that of a label; else all are inputs.
    num_classes: labels must be integers from 0 to below it. None: labels are not checked.
    has_collate: whether there is a collate function. It may make further inputs, so a sample may lack some.

    Raises DataError, with the dataset's name and the sample's index, for a sample that training cannot use: an image
    must be uint8 (H, W, C), which is normalised later, or float (C, H, W), which is not. An OSError of the dataset
    becomes a DataError, and any other exception a RuntimeError, with the index. Without a collate function all samples
    need the shapes of the one that is read first.
    """

    def __init__(
        self,
        dataset: Any,
        names: Sequence[str],
        num_classes: int | None,
        has_collate: bool = False,
        has_label: bool = True,
    ) -> None:
        self.dataset, self.names, self.num_classes = dataset, tuple(names), num_classes
        self.has_collate, self.has_label = has_collate, has_label
        self._label = self.names[len(self.names) - has_label :]
        self.name = type(dataset).__name__
        self._first: tuple[str, list[tuple[int, ...]]] | None = None  # the name of the first sample, and its shapes

    def without_augmentation(self) -> "Samples":
        """Returns the samples of the dataset's `without_augmentation()`, or the same samples if it has none."""
        plain = copy(self)
        if callable(getattr(self.dataset, "without_augmentation", None)):
            plain.dataset = self.dataset.without_augmentation()
        return plain

    def __getattr__(self, name: str) -> Any:
        """The dataset's own attributes, for samplers and tasks."""
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        where = f"{self.name}[{index}]"
        try:
            sample = self.dataset[index]
        except DataError:
            raise
        except Exception as error:
            kind = DataError if isinstance(error, OSError) else RuntimeError
            raise kind(f"{where} raised {type(error).__name__}: {error}") from error
        return self.checked(sample, where)

    def checked(self, sample: Any, where: str | None = None) -> dict[str, Any]:
        """Returns the sample as a dict. Raises DataError, which says `where`, if training cannot use it."""
        where = where or f"a sample of {self.name}"
        sample = self._named(where, sample)
        names = [name for name in self.names if name in sample]
        for name in names if self.has_collate else sample:  # torch's own collate function refuses None
            if sample[name] is None:
                raise DataError(f"{where} has None as {name!r}: return a tensor")
        for name in names[:-1] if self.has_label else names:
            _check_input(where, name, sample[name])
        if self.has_label and self.num_classes is not None:
            _check_label(f"{where} has {names[-1]!r}", sample[names[-1]], self.num_classes)
        if not self.has_collate:
            self._check_shapes(where, [tuple(getattr(sample[name], "shape", ())) for name in names])
        changed = {name: new for name, old in sample.items() if (new := _for_torch(old)) is not old}
        return {**sample, **changed} if changed else sample

    def collate(self, samples: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
        """Makes a batch of a stream's samples, which are checked here: a loader then reads the stream itself."""
        return collate([self.checked(sample) for sample in samples])

    def _named(self, where: str, sample: Any) -> dict[str, Any]:
        """The sample as a dict, with all fields that it needs."""
        names, wanted = self.names, f"return ({', '.join(self.names)}), or a dict of these"
        if not isinstance(sample, dict):
            if not isinstance(sample, tuple | list) and len(names) > 1:
                raise DataError(f"{where} is of type {type(sample).__name__}: {wanted}")
            parts = sample if isinstance(sample, tuple | list) else (sample,)
            if self.has_collate and self.has_label < len(parts) < len(names):
                names = *names[: len(parts) - self.has_label], *self._label
            if len(parts) != len(names):
                raise DataError(f"{where} has {len(parts)} parts: {wanted}")
            sample = dict(zip(names, parts, strict=True))
        for name in self._label if self.has_collate else self.names:
            if name not in sample:
                fields = ", ".join(map(str, sample))
                remedy = "rename one, or set task.inputs and task.label"
                raise DataError(f"{where} has no field {name!r}, only {fields}: {remedy}")
        return sample

    def _check_shapes(self, where: str, shapes: list[tuple[int, ...]]) -> None:
        self._first = self._first or (where, shapes)
        for name, found, first in zip(self.names, shapes, self._first[1], strict=True):
            if found != first:
                pads = found[1:] == first[1:] and ", or pad them with 'data.collate={_target_: data.collate.pad}'"
                raise DataError(
                    f"{where} has {name!r} of shape {found}, and {self._first[0]} of shape {first}: give all samples "
                    f"one shape{pads or ''}"
                )


def _for_torch(value: Any) -> Any:
    """The value in a form that torch and networks accept."""
    if isinstance(value, float | np.floating):  # torch would make it float64, which networks refuse
        return torch.tensor(value, dtype=torch.float32)
    if isinstance(value, np.ndarray) and min(value.strides, default=0) < 0:  # torch refuses negative strides
        return np.ascontiguousarray(value)
    return value


def _check_label(found: str, label: Any, num_classes: int) -> None:
    if math.prod(getattr(label, "shape", ())) != 1:
        remedy = "give the number of its class, or choose task=multilabel"
        if len(label.shape) > 1:
            remedy = "for a mask choose task=own with your own task, as in examples/segmentation"
        raise DataError(f"{found} of shape {tuple(label.shape)}: {remedy}")
    number, numbers = label.item() if hasattr(label, "item") else label, f"0 to {num_classes - 1}"
    if isinstance(number, str):
        raise DataError(f"{found} {number!r}: give its number, {numbers}")
    if not isinstance(number, int):
        raise DataError(f"{found} {number!r}: give an integer, or choose task=regression")
    if not 0 <= number < num_classes:
        raise DataError(f"{found} {number}: give {numbers}, as there are {num_classes} classes")


def _check_input(where: str, name: str, value: Any) -> None:
    if isinstance(value, np.ndarray) and value.dtype.kind in "uifb":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if name != "image" and isinstance(value, int | float | np.number | str):
        return
    if not isinstance(value, torch.Tensor):
        kind, hint = type(value).__name__, f", such as torch.from_numpy(np.array({name}))"
        is_pillow = "PIL" in type(value).__module__
        raise DataError(f"{where} has {name!r} of type {kind}: return a tensor{hint if is_pillow else ''}")
    shape, kind = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    if value.is_floating_point() and kind != "float32":
        raise DataError(f"{where} has {kind} values as {name!r}: return them as float32")
    if name != "image":
        return
    if kind not in ("uint8", "float32"):
        raise DataError(f"{where} has an image of {kind}: return uint8 (H, W, C) or float (C, H, W)")
    channels, height, order = (-1, 0, "(H, W, C)") if kind == "uint8" else (0, -1, "(C, H, W)")
    if len(shape) != 3:
        raise DataError(f"{where} has an image of shape {shape}: {kind} images have three dimensions, {order}")
    if shape[channels] not in CHANNELS and shape[height] in CHANNELS:
        raise DataError(f"{where} has an image of shape {shape}: {kind} images are {order}; use permute")
