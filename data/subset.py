"""Subset: some samples of a dataset. It offers what the dataset offers (data/__init__.py), for these samples.

split: divides a dataset into training and validation samples, the same ones each time.
"""

from collections.abc import Sequence
from inspect import ismethod
from typing import Any

import numpy as np

from data.errors import DataError
from data.own_transform import switch
from loaders import offers

PASSED_ON = ("classes", "mean", "std", "sample_spec", "augment_batch", "prepare")  # not a value per sample
TRANSLATED = ("will_read", "path")  # methods that get translated indices


class Subset:
    """The samples of `dataset` at `indices`, int64 (N,).

    A method of the dataset that may take an index is not passed on: call it on `dataset`.
    """

    def __init__(self, dataset: Any, indices: np.ndarray) -> None:
        self.dataset = dataset
        self.indices = indices
        for name in ("read_batch", "arrays"):
            switch(self, name, offers(dataset, name))

    def __getattr__(self, name: str) -> Any:
        """The dataset's attributes, such as `labels`. Those with a value per sample have the values of the subset."""
        kind = type(self).__name__
        if name.startswith("_") or name in ("dataset", "indices"):
            raise AttributeError(f"{kind} has no {name}")
        value = getattr(self.dataset, name)
        if name in PASSED_ON:
            return value
        if name == "without_augmentation":
            return lambda: Subset(value(), self.indices)
        if name in TRANSLATED:
            return lambda index: value(self.indices[index])
        if ismethod(value):
            raise AttributeError(f"{kind} has no {name}(), as it may take an index: call dataset.{name}")
        if hasattr(value, "iloc"):  # pandas looks for its own labels, not for positions
            value = value.to_numpy()
        count = len(self.dataset)
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == count:
            return [value[int(index)] for index in self.indices]
        if getattr(value, "shape", ())[:1] == (count,):
            return value[self.indices]
        return value

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]

    def read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        self.dataset.read_batch(self.indices[indices], out, random)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array[self.indices] for name, array in self.dataset.arrays().items()}


def unaugmented(dataset: Any) -> Any:
    """The same samples without augmentation, if the dataset has a method for it; else the dataset."""
    if hasattr(dataset, "without_augmentation"):
        return dataset.without_augmentation()
    return dataset


def split(dataset: Any, fraction: float) -> tuple[Any, Any]:
    """Splits the dataset into (training samples, validation samples), each in the dataset's order.

    The validation samples are a random `fraction` (0..1), the same ones each time, and are not augmented. With 0 there
    are none. A dataset may have `is_val`, bool (N,), which names the validation samples; `val_groups`, (N,): samples
    of a group are never separated; `stratify`: each class in `labels` is split by itself. So is each part of a
    mixture. Raises DataError if the dataset cannot be split so.
    """
    if hasattr(dataset, "split_parts"):
        training, validation = dataset.split_parts(fraction)
        return training, validation
    is_val = getattr(dataset, "is_val", None)
    if is_val is None:
        if not fraction:
            return dataset, Subset(dataset, np.arange(0))
        is_val = choose(dataset, fraction)
    elif fraction:
        raise DataError(f"data.val_fraction={fraction}: data.split has val rows already; leave one of them out")
    training = Subset(dataset, np.flatnonzero(~is_val))
    return training, Subset(unaugmented(dataset), np.flatnonzero(is_val))


def choose(dataset: Any, fraction: float) -> np.ndarray:
    """Chooses the validation samples at random: bool (N,)."""
    count = len(dataset)
    if count < 2 or not 0 < fraction < 1:
        raise DataError(f"data.val_fraction={fraction} of {count} samples: give a share below 1, of 2 or more")
    groups = getattr(dataset, "val_groups", None)
    is_stratified = getattr(dataset, "stratify", False)
    if groups is None and not is_stratified:
        size = min(max(1, round(fraction * count)), count - 1)
        order = np.random.default_rng(0).permutation(count)
        return np.isin(np.arange(count), order[:size])
    if groups is None:
        groups = np.arange(count)
    classes = np.asarray(dataset.labels) if is_stratified else np.zeros(count, int)
    if classes.shape != (count,) or classes.dtype.kind not in "iu":
        raise DataError("data.stratify=true needs a class per sample: set it to false")
    return choose_groups(classes, groups, fraction)


def choose_groups(classes: np.ndarray, groups: np.ndarray, fraction: float) -> np.ndarray:
    """Chooses whole groups at random, as nearly a `fraction` of the samples of each class as groups allow: bool (N,).

    A group counts for the class of its first sample. The first group of a class is never chosen, so that all classes
    are trained, if no group has several. If too few samples of a class are chosen, the next class makes up for at most
    half a sample.
    """
    _, firsts, numbers, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    group_classes = classes[firsts]
    order = np.random.default_rng(0).permutation(len(firsts))
    order = order[np.argsort(group_classes[order], kind="stable")]
    is_chosen = np.zeros(len(order), bool)
    owed = 0.0  # samples of this class that are still to be chosen
    previous = None
    for group in order.tolist():
        label = group_classes[group]
        if label != previous:
            owed = min(owed, 0.5)
        owed += fraction * sizes[group]
        if label == previous and owed >= sizes[group] / 2:
            is_chosen[group] = True
            owed -= sizes[group]
        previous = label
    if not is_chosen.any():
        raise DataError(f"data.val_fraction={fraction} is less than half of a group or class: give a larger share")
    return is_chosen[numbers]
