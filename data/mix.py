"""Mix: several datasets as one, whose training samples are drawn from each by weights (loaders.Mixture)."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset

from data import optional
from data.classes import with_classes
from data.errors import DataError, Range, check_choice, check_range
from data.subset import Fold, split, unaugmented, undivided
from loaders import Mixture, offers

log = logging.getLogger(__name__)


def mixed(
    train: bool,
    parts: dict[str, Callable[..., Any]],
    weights: dict[str, float] | None = None,
    test: str | None = None,
    classes: Sequence[str] | None = None,
) -> Any:
    """Returns a Mix of the training sets of all parts, or the test set of the part `test` (None: the first part).

    parts: functions of `train` that return a dataset, by name.
    weights: how often each part is drawn, by name, see loaders.Mixture. None: in proportion to the lengths.
    classes: the labels of all parts become numbers of these names: see data/classes.py. None: those of the first part.
    Raises DataError for parts that do not fit together.
    """
    if not parts:
        raise DataError("data.parts is empty: put /data@data.parts.NAME: image_folder into an experiment's defaults")
    if weights is not None and weights.keys() != parts.keys():
        raise DataError(f"data.weights={weights}: give a number for each of the parts {', '.join(parts)}")
    for name, weight in (weights or {}).items():
        check_range(f"data.weights.{name}", weight, Range(0))
    if test is None:
        test = next(iter(parts))
    check_choice("data.test", test, parts)
    names = list(parts) if train else [test]
    datasets = {name: parts[name](train=train) for name in names}
    for name, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            raise DataError(f"data.parts.{name} is a stream: a mixture needs datasets that have a length")
    owner = "data.classes"
    if train and classes is None:
        first = names[0]
        owner = f"data.parts.{first}"
        classes = optional(datasets[first], "classes")
    for name in datasets:
        remedy = "set data.classes=[NAME,...] to the names of all parts"
        datasets[name] = with_classes(datasets[name], classes, owner, f"data.parts.{name}", remedy=remedy)
    if not train:
        return datasets[test]
    return Mix(datasets, weights, test, classes)


def as_tensor(value: Any) -> Any:
    """Numbers and arrays as tensors, of the dtypes that a batch of them has. Other values stay."""
    is_numeric = isinstance(value, np.ndarray | np.generic | int | float)
    return torch.as_tensor(np.asarray(value)) if is_numeric else value


class Mix(ConcatDataset[Any]):
    """The samples of the datasets in `parts`, one after the other. If all parts have `read_batch`, so has the mixture.

    tested: the name of the part that prepares new images. classes: None if the first part has none; then no part may.
    The mean and std are those of the first part.
    """

    def __init__(
        self, parts: dict[str, Any], weights: dict[str, float] | None, tested: str, classes: Sequence[str] | None
    ) -> None:
        super().__init__(parts.values())
        self.names = list(parts)
        self.weights = weights
        self.tested = self.names.index(tested)
        self.classes = classes
        if classes is None:
            self._check_common("classes", [optional(part, "classes") for part in parts.values()])
        numbers = {key: [optional(part, key) for part in parts.values()] for key in ("mean", "std")}
        self.mean = numbers["mean"][0]
        self.std = numbers["std"][0]
        for key, values in numbers.items():
            if len({*values}) > 1:
                log.info(
                    "the parts of the mixture have different %s, %s: without data.%s the first is used",
                    key,
                    values,
                    key,
                )
        specs = [part.sample_spec() for part in parts.values() if offers(part, "read_batch")]
        self._spec = specs[0] if specs else None
        if len(specs) == len(parts):
            self._check_common("sample_spec (as by image_size)", specs)

    def _check_common(self, key: str, values: list[Any]) -> None:
        """Raises DataError unless all parts have the same value."""
        first, *others = values
        for name, other in zip(self.names[1:], others, strict=True):
            if other != first:
                raise DataError(
                    f"data.parts.{name} has another {key} than {self.names[0]}: {other}, not {first}; make them "
                    "equal, classes also by data.classes"
                )

    @property
    def mixture(self) -> Mixture:
        """The order of training."""
        lengths = tuple(len(part) for part in self.datasets)  # type: ignore[arg-type]
        if self.weights is None:
            return Mixture(lengths, lengths)
        return Mixture(lengths, tuple(self.weights[name] for name in self.names))

    @property
    def labels(self) -> np.ndarray | None:
        """None if a part has none."""
        labels: list[Any] = [optional(part, "labels") for part in self.datasets]
        return None if any(part is None for part in labels) else np.concatenate(labels)

    def split_parts(self, choice: float | Fold) -> list["Mix"]:
        """Splits each part by itself: see data.subset.split."""
        pairs = [split(part, choice) for part in self.datasets]
        return [self._of(side) for side in zip(*pairs, strict=True)]

    def __getitem__(self, index: int) -> Any:
        """A sample. If a part has a `sample_spec`, those of the others get its form: a dict of tensors."""
        sample: Any = super().__getitem__(index)  # type: ignore[no-untyped-call]  # torch has no types here
        if self._spec is None:
            return sample
        if not isinstance(sample, Mapping) and len(sample) != len(self._spec):
            raise DataError(
                f"a part of the mixture gives {len(sample)} values per sample, and another part the fields "
                f"{', '.join(self._spec)}: return a dict with these names from its __getitem__"
            )
        fields = sample if isinstance(sample, Mapping) else dict(zip(self._spec, sample, strict=True))
        return {name: as_tensor(value) for name, value in fields.items()}

    def set_epoch(self, epoch: int) -> None:
        for part in self.datasets:
            if set_epoch := optional(part, "set_epoch"):
                set_epoch(epoch)

    def without_augmentation(self) -> "Mix":
        return self._of([unaugmented(part) for part in self.datasets])

    def _of(self, datasets: Iterable[Any]) -> "Mix":
        """The mixture with other samples of each part."""
        mix = copy(self)
        ConcatDataset.__init__(mix, datasets)
        return mix

    @property
    def prepare(self) -> Callable[[Any], Any] | None:
        """The method of the part that is tested; None if it has none."""
        part = undivided(self.datasets[self.tested])
        return part.prepare if offers(part, "prepare") else None

    def sample_spec(self) -> Any:
        return self.datasets[0].sample_spec()  # type: ignore[attr-defined]

    @property
    def read_batch(self) -> Callable[..., None] | None:
        """Reads from all parts; None if one of them has no `read_batch`."""
        return self._read_batch if all(offers(dataset, "read_batch") for dataset in self.datasets) else None

    def _read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        """Writes the samples at `indices` (B,) into `out`, part by part; each row has its own random numbers.

        A field that a part adds to `out` must be a list with an item per row; rows of other parts get None.
        """
        numbers = np.searchsorted(self.cumulative_sizes, indices, side="right")
        fields = list(out)
        for number in np.unique(numbers).tolist():
            part: Any = self.datasets[number]
            rows = np.flatnonzero(numbers == number)
            batch: dict[str, Any] = {name: torch.empty_like(out[name][: len(rows)]) for name in fields}
            start = self.cumulative_sizes[number] - len(part)
            part.read_batch(indices[rows] - start, batch, random.of_rows(rows))
            for name, values in batch.items():
                if name in fields:
                    out[name][rows] = values
                elif isinstance(values, list) and len(values) == len(rows):
                    column = out.setdefault(name, [None] * len(indices))
                    for row, value in zip(rows.tolist(), values, strict=True):
                        column[row] = value
                else:
                    kind = type(values).__name__
                    raise DataError(
                        f"data.parts.{self.names[number]}: read_batch adds {name!r}, a {kind}, and a mixture needs a "
                        "list with an item per row: return one, or remove the method"
                    )
