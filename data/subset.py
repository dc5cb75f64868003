"""Subset: some samples of a dataset, with all that the dataset offers (data/__init__.py), for these samples."""

from collections.abc import Sequence
from inspect import ismethod
from typing import Any

import numpy as np

from data.errors import DataError
from loaders import offers

AS_THEY_ARE = ("sample_spec", "augment_batch", "prepare")  # methods that take no index
TRANSLATED = ("will_read", "path", "without_augmentation")  # methods that Subset has if the dataset has them


class Subset:
    """The samples of `dataset` at `indices`, int64 (N,).

    Other methods of the dataset are not passed on, as they may take an index: call them on `dataset`.
    """

    def __init__(self, dataset: Any, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, indices
        for name in (*AS_THEY_ARE, "classes", "mean", "std"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        for name in ("read_batch", "arrays"):
            if not offers(dataset, name):
                setattr(self, name, None)  # a loader then reads the subset as it reads the dataset: without it

    def __getattr__(self, name: str) -> Any:
        """The dataset's attributes, such as `labels`; those with a value per sample have only this part's values."""
        if name.startswith("_") or name in ("dataset", "indices"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        value = getattr(self.dataset, name)
        if name in TRANSLATED:
            return getattr(self, f"_{name}")
        if ismethod(value):
            raise AttributeError(
                f"{type(self).__name__} has no {name}(), as it may take an index: call dataset.{name}"
            )
        if hasattr(value, "iloc"):  # of pandas, which would look for its own labels
            value = value.to_numpy()
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
        sizes = (len(value),) if is_sequence else getattr(value, "shape", ())
        if sizes[:1] != (len(self.dataset),):
            return value
        return [value[int(index)] for index in self.indices] if is_sequence else value[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]

    def read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        self.dataset.read_batch(self.indices[indices], out, random)

    def _will_read(self, indices: np.ndarray) -> None:
        self.dataset.will_read(self.indices[indices])

    def _path(self, index: int) -> str:
        return str(self.dataset.path(int(self.indices[index])))

    def _without_augmentation(self) -> "Subset":
        return Subset(self.dataset.without_augmentation(), self.indices)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array[self.indices] for name, array in self.dataset.arrays().items()}


def split(dataset: Any, fraction: float) -> tuple[Any, Any]:
    """Splits a random `fraction` (0..1) off the dataset: (the rest, the part), each in the dataset's order.

    The part is the same each time. It is not augmented if the dataset has a method `without_augmentation()`.
    A dataset may have `is_val`, bool (N,): this is the part; `val_groups` (N,): each group is on one side;
    `stratify`: whether the part has its share of each of the classes in `labels`. A mixture splits each part.
    """
    if hasattr(dataset, "split_parts"):
        rest, part = dataset.split_parts(fraction)
        return rest, part
    chosen, groups = (getattr(dataset, name, None) for name in ("is_val", "val_groups"))
    is_stratified, count = getattr(dataset, "stratify", False), len(dataset)
    if not fraction and chosen is None:
        return dataset, Subset(dataset, np.arange(0))
    if fraction and chosen is not None:
        raise DataError(f"data.val_fraction={fraction}: data.split has val rows already; leave one of them out")
    if chosen is None and (count < 2 or not 0 < fraction < 1):
        raise DataError(f"data.val_fraction={fraction} of {count} samples: give a share below 1, of 2 or more")
    if chosen is None and groups is None and not is_stratified:
        size = min(max(1, round(fraction * count)), count - 1)
        chosen = np.zeros(count, bool)
        chosen[np.random.default_rng(0).permutation(count)[:size]] = True
    elif chosen is None:
        classes = np.asarray(dataset.labels) if is_stratified else np.zeros(count, int)
        if classes.shape != (count,) or classes.dtype.kind not in "iu":
            raise DataError("data.stratify=true needs a class per sample: set it to false")
        chosen = shares(classes, np.arange(count) if groups is None else groups, fraction)
    plain = dataset.without_augmentation() if hasattr(dataset, "without_augmentation") else dataset
    return Subset(dataset, np.flatnonzero(~chosen)), Subset(plain, np.flatnonzero(chosen))


def shares(classes: np.ndarray, groups: np.ndarray, fraction: float) -> np.ndarray:
    """Chooses whole groups at random, a `fraction` of the samples of each class, as nearly as groups allow: bool (N,).

    A group counts for the class of its first sample. The first group of a class is never chosen, so that all classes
    are trained, if no group has several. What a class has chosen too little is chosen from the next one, up to half a
    sample.
    """
    _, firsts, numbers, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    order = np.random.default_rng(0).permutation(len(firsts))
    order = order[np.argsort(classes[firsts[order]], kind="stable")]
    is_chosen, owed, last = np.zeros(len(order), bool), 0.0, None
    for group in order.tolist():
        label, size = classes[firsts[group]], sizes[group]
        if label != last:
            owed = min(owed, 0.5)
        owed += fraction * size
        if label == last and owed >= size / 2:
            is_chosen[group] = True
            owed -= size
        last = label
    if not is_chosen.any():
        raise DataError(f"data.val_fraction={fraction} is less than half of a group or class: give a larger share")
    return is_chosen[numbers]
