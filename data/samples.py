"""Samples: wraps a dataset that reads sample by sample, checks what it returns, and gives names to tuples."""

import math
from collections.abc import Sequence
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
        self.name = type(dataset).__name__
        self._first: tuple[str, list[tuple[int, ...]]] | None = None  # the name of the first sample, and its shapes

    def without_augmentation(self) -> "Samples":
        """Returns the samples of the dataset's `without_augmentation()`, or the same samples if it has none."""
        plain = copy(self)
        if callable(getattr(self.dataset, "without_augmentation", None)):
            plain.dataset = self.dataset.without_augmentation()
        return plain

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            sample = self.dataset[index]
        except DataError:
            raise
        except Exception as error:
            said = f"{self.name}[{index}] raised {type(error).__name__}: {error}"
            raise (DataError(said) if isinstance(error, OSError) else RuntimeError(said)) from error
        return self.checked(sample, index)

    def checked(self, sample: Any, index: int) -> dict[str, Any]:
        where, names = f"{self.name}[{index}]", self.names
        if not isinstance(sample, dict | tuple | list) and len(names) == 1:
            sample = (sample,)
        if isinstance(sample, tuple | list):
            if self.has_collate and 1 < len(sample) < len(names):
                names = *names[: len(sample) - 1], names[-1]
            if len(sample) != len(names):
                raise DataError(f"{where} has {len(sample)} parts: return ({', '.join(names)}), or a dict of these")
            sample = dict(zip(names, sample, strict=True))
        if not isinstance(sample, dict):
            raise DataError(f"{where} is {_kind(sample)}: return ({', '.join(names)}), or a dict of these")
        if self.has_collate:
            names = tuple(name for name in names if name in sample)
        if missing := [name for name in (*names, self.names[-1]) if name not in sample]:
            raise DataError(
                f"{where} has no field {missing[0]!r}, only {', '.join(map(str, sample))}: rename one, or set "
                "task.inputs and task.label"
            )
        for name, value in sample.items():
            if value is None:
                raise DataError(f"{where} has None as {name!r}: return a tensor")
        for name in names[:-1] if self.has_label else names:
            _check_input(where, name, sample[name])
        if self.has_label:
            self._check_label(where, names[-1], sample[names[-1]])
        if not self.has_collate:
            self._check_shapes(where, [getattr(sample[name], "shape", ()) for name in names])
        changed = {name: new for name, old in sample.items() if (new := _for_torch(old)) is not old}
        return {**sample, **changed} if changed else sample

    def _check_shapes(self, where: str, shapes: list[tuple[int, ...]]) -> None:
        if self._first is None:
            self._first = where, shapes
        first, wanted = self._first
        if shapes != wanted:
            number = next(number for number, shape in enumerate(shapes) if shape != wanted[number])
            raise DataError(
                f"{where} has {self.names[number]!r} of shape {tuple(shapes[number])}, and {first} of shape "
                f"{tuple(wanted[number])}: give all samples one shape, or pad them with "
                "'data.collate={_target_: data.collate.pad}'"
            )

    def _check_label(self, where: str, name: str, label: Any) -> None:
        if self.num_classes is None:
            return
        is_tensor = isinstance(label, torch.Tensor | np.ndarray | np.generic)
        if is_tensor and math.prod(label.shape) != 1:
            raise DataError(
                f"{where} has {name!r} of shape {tuple(label.shape)}: give the number of its class, or choose "
                "task=multilabel"
            )
        if isinstance(label, str):
            raise DataError(f"{where} has {name!r} {label!r}: give its number, 0 to {self.num_classes - 1}")
        number = label.item() if is_tensor else label
        if not isinstance(number, int):
            raise DataError(f"{where} has {name!r} {number!r}: give an integer, or choose task=regression")
        if not 0 <= number < self.num_classes:
            raise DataError(
                f"{where} has {name!r} {number}: give 0 to {self.num_classes - 1}, as there are {self.num_classes} "
                "classes"
            )


def _for_torch(value: Any) -> Any:
    """The value in a form that torch and networks accept."""
    if isinstance(value, float | np.floating):  # torch would make it float64, which networks refuse
        return torch.tensor(value, dtype=torch.float32)
    if isinstance(value, np.ndarray) and min(value.strides, default=0) < 0:  # torch refuses negative strides
        return np.ascontiguousarray(value)
    return value


def _check_input(where: str, name: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value)) if value.dtype.kind in "uifb" else value
    if name != "image" and isinstance(value, int | float | np.number):
        return
    if not isinstance(value, torch.Tensor):
        hint = f", such as torch.from_numpy(np.array({name}))" if "PIL" in type(value).__module__ else ""
        raise DataError(f"{where} has {_kind(value)} as {name!r}: return a tensor{hint}")
    if value.is_floating_point() and value.dtype != torch.float32:
        raise DataError(
            f"{where} has {str(value.dtype).removeprefix('torch.')} values as {name!r}: return them as float32"
        )
    if name != "image":
        return
    shape = tuple(value.shape)
    if value.dtype != torch.uint8 and not value.is_floating_point():
        raise DataError(f"{where} has an image of {value.dtype}: return uint8 (H, W, C) or float (C, H, W)")
    channels, height, order = (-1, 0, "(H, W, C)") if value.dtype == torch.uint8 else (0, -1, "(C, H, W)")
    if len(shape) != 3:
        raise DataError(f"{where} has an image of shape {shape}: {value.dtype} images have three dimensions, {order}")
    if shape[channels] not in CHANNELS and shape[height] in CHANNELS:
        raise DataError(f"{where} has an image of shape {shape}: {value.dtype} images are {order}; use permute")


def _kind(value: Any) -> str:
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
