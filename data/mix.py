"""Mix: several datasets as one, whose training samples are drawn from each by weights (loaders.Mixture)."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset

from data.array_dataset import ArrayDataset
from data.errors import DataError, check_choice
from data.images.crops import CroppedDataset, class_indices
from data.subset import split
from loaders import Mixture, offers


def mixed(
    train: bool,
    parts: dict[str, Callable[..., Any]],
    weights: dict[str, float] | None = None,
    test: str | None = None,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Any:
    """The training sets of all parts, or the test set of the part `test` (None: the first).

    parts: by name, functions of `train` that return a dataset. weights: by name, see loaders.Mixture; None: lengths.
    classes, mean, std: None: those that all parts have. The labels of our own datasets are translated to `classes`.
    Raises DataError for parts that do not fit together.
    """
    if not parts:
        raise DataError("data.parts is empty: put /data@data.parts.NAME: image_folder into an experiment's defaults")
    if weights is not None and weights.keys() != parts.keys():
        raise DataError(f"data.weights={weights}: give a number for each of the parts {', '.join(parts)}")
    tested = test or next(iter(parts))
    check_choice("data.test", tested, parts)
    built = {name: parts[name](train=train) for name in (parts if train else [tested])}
    for name, part in built.items():
        if isinstance(part, IterableDataset):
            raise DataError(f"data.parts.{name} is a stream: a mixture needs datasets that have a length")
        if classes is not None and isinstance(part, ArrayDataset | CroppedDataset):
            own, where = np.array(part.classes)[part.labels], f"data.parts.{name}, sample {{}}".format
            part.labels = class_indices(own, np.array(classes), where, "add it to data.classes")
            part.classes = tuple(classes)
    return Mix(built, weights, {"classes": classes, "mean": mean, "std": std}) if train else built[tested]


class Mix(ConcatDataset[Any]):
    """The samples of the datasets in `parts`, one after the other. Batches are read part by part, if all parts can.

    about: values of attributes; None: the one that all parts have. Raises DataError if they differ.
    """

    is_val = None  # a part may have samples to validate on: see data.subset.split

    def __init__(self, parts: dict[str, Any], weights: dict[str, float] | None, about: dict[str, Any]) -> None:
        super().__init__(parts.values())
        self.parts, self.weights, self.about = parts, weights, about
        for key, value in about.items():
            setattr(self, key, value or self._common(key, [getattr(part, key, None) for part in self.datasets]))
        if all(offers(part, "read_batch") for part in self.datasets):
            specs = [dict(part.sample_spec()) for part in self.datasets]  # type: ignore[attr-defined]
            self._common("image_size", [list(spec.items()) for spec in specs])
        else:
            self.read_batch = None  # type: ignore[assignment]  # a loader then reads sample by sample

    def _common(self, key: str, values: list[Any]) -> Any:
        for name, value in zip(self.parts, values, strict=True):
            if list(value or ()) != list(values[0] or ()):
                differ = f"data.parts.{name} has another {key} than {next(iter(self.parts))}: {value}, not {values[0]}"
                raise DataError(f"{differ}; make them equal, or set data.{key} for classes, mean and std")
        return values[0]

    @property
    def mixture(self) -> Mixture:
        """The order of training."""
        lengths = {name: len(part) for name, part in self.parts.items()}
        weights = lengths if self.weights is None else self.weights
        return Mixture(tuple(lengths.values()), tuple(weights[name] for name in lengths))

    @property
    def labels(self) -> np.ndarray:
        return np.concatenate([part.labels for part in self.datasets])  # type: ignore[attr-defined]

    def split_parts(self, fraction: float) -> list["Mix"]:
        """Splits each part by itself: see data.subset.split."""
        pairs = [split(part, fraction) for part in self.datasets]
        return [self._of(side) for side in zip(*pairs, strict=True)]

    def without_augmentation(self) -> "Mix":
        return self._of([getattr(part, "without_augmentation", partial(copy, part))() for part in self.datasets])

    def _of(self, parts: Iterable[Any]) -> "Mix":
        return Mix(dict(zip(self.parts, parts, strict=True)), self.weights, self.about)

    def sample_spec(self) -> Any:
        return self.datasets[0].sample_spec()  # type: ignore[attr-defined]

    def read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        """Writes the samples at `indices` (B,) into `out`, part by part; each row has its own random numbers."""
        numbers = np.searchsorted(self.cumulative_sizes, indices, side="right")
        for number in np.unique(numbers).tolist():
            part: Any = self.datasets[number]
            rows = np.flatnonzero(numbers == number)
            own = {name: torch.empty_like(field[: len(rows)]) for name, field in out.items()}
            first = self.cumulative_sizes[number] - len(part)
            part.read_batch(indices[rows] - first, own, random.of_rows(rows))
            for name, field in own.items():  # KeyError if a part adds fields
                out[name][rows] = field
