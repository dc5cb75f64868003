"""Subset: some samples of a dataset. It offers what the dataset offers (data/__init__.py), for these samples.

split: divides a dataset into training and validation samples, the same ones each time.
"""

import logging
import os
from collections.abc import Callable, Sequence, Set
from copy import copy
from hashlib import blake2b
from inspect import ismethod
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from data import OPTIONAL, length_of, optional
from data.errors import DataError, explained
from loaders import Random, offers

log = logging.getLogger(__name__)

KEPT = 16_384  # identities in a sketch: 128 kB
BLOCK = 10_000  # values that are Python objects at a time
PASSED_ON = ("classes", "mean", "std", "sample_spec", "augment_batch", "set_epoch")  # no value per sample
TRANSLATED = ("will_read", "path")  # methods that get translated indices


class Fold(NamedTuple):
    """A training set is divided into `folds` parts; the part with the number `fold`, from 0, validates."""

    fold: int
    folds: int


class Wrapper:
    """A dataset around another one, its `dataset`.

    An attribute that only the dataset inside has, such as a callback's `level`, is set there: so it is used. What the
    wrapper has by then is refused: its methods, its `dataset`, and what is set before that. Other attributes are its
    own.
    """

    dataset: Any
    _own: Set[str] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if "dataset" not in own:
            super().__setattr__(name, value)
            if name == "dataset":
                own["_own"] = frozenset(own)
            return
        is_inside = hasattr(self.dataset, name)
        if name in self._own or hasattr(type(self), name) or (is_inside and name in own):
            raise DataError(
                f"{type(self).__name__}.{name} cannot be set: it holds a {type(self.dataset).__name__}, and needs its "
                f"own {name}; set that of its `dataset`, or give yours another name"
            )
        if is_inside:
            self._set_inside(name, value)
        else:
            super().__setattr__(name, value)

    def _set_inside(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    @property
    def prepare(self) -> Any:
        """How the dataset inside prepares a new image, or None."""
        return optional(self.dataset, "prepare")


def if_offered(method: Callable[..., Any]) -> Any:
    """A wrapper's method as a property, which is None unless the dataset inside offers a method of this name."""

    def bound(self: Wrapper) -> Callable[..., Any] | None:
        return MethodType(method, self) if offers(self.dataset, method.__name__) else None

    return property(bound, doc=method.__doc__)


class Subset(Wrapper):
    """The samples of `dataset` at `indices`, int64 (N,).

    A method of the dataset that may take an index is not passed on: call it on `dataset`. Of an attribute with a value
    per sample, those of these samples are read and set.
    """

    def __init__(self, dataset: Any, indices: np.ndarray) -> None:
        self.indices = indices
        self.dataset = dataset  # last: see Wrapper

    def _set_inside(self, name: str, value: Any) -> None:
        values = getattr(self.dataset, name)
        if name not in PASSED_ON and is_per_sample(values, self.dataset):
            if not is_per_sample(value, self):
                text = " ".join(repr(value).split())[:60]
                raise DataError(f"{name} of {len(self)} samples of a dataset: give a value for each, not {text}")
            value = with_values(values, self.indices, value)
        super()._set_inside(name, value)

    def __getattr__(self, name: str) -> Any:
        """The dataset's attributes, such as `labels`. Those with a value per sample have the values of the subset."""
        kind = type(self).__name__
        if name.startswith("_") or name in ("dataset", "indices"):
            raise AttributeError(f"{kind} has no {name}")
        value = optional(self.dataset, name) if name in OPTIONAL else getattr(self.dataset, name)
        if value is None and name in OPTIONAL:
            raise AttributeError(f"{kind} has no {name}")
        if name in PASSED_ON:
            return value
        if name == "without_augmentation":
            return lambda: self._of(unaugmented(self.dataset))
        if name in TRANSLATED:
            return lambda index: value(self.indices[index])
        if ismethod(value):
            raise AttributeError(f"{kind} has no {name}(), as it may take an index: call dataset.{name}")
        if not is_per_sample(value, self.dataset):
            return value
        if hasattr(value, "iloc"):  # pandas looks for its own labels, not for positions
            part = value.iloc[self.indices]
            return part.to_numpy() if part.ndim == 1 else part.reset_index(drop=True)
        if isinstance(value, Sequence):
            return [value[int(index)] for index in self.indices]
        return value[self.indices]

    def _of(self, dataset: Any) -> Any:
        """The samples at the same indices of another dataset."""
        other = copy(self)
        vars(other)["dataset"] = dataset
        return other

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]

    @if_offered
    def read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        self.dataset.read_batch(self.indices[indices], out, random)

    @if_offered
    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array[self.indices] for name, array in self.dataset.arrays().items()}


def is_per_sample(value: Any, dataset: Any) -> bool:
    """Whether an attribute of the dataset has a value for each sample."""
    count = len(dataset)
    if isinstance(value, Sequence):
        return not isinstance(value, str) and len(value) == count
    return bool(getattr(value, "shape", ())[:1] == (count,))


def with_values(values: Any, indices: np.ndarray, new: Any) -> Any:
    """A copy of `values`, a list, array, tensor or pandas column, with the `new` ones at the indices."""
    if hasattr(values, "iloc"):
        values = values.copy()
        values.iloc[indices] = np.asarray(new)
        return values
    source = np.arange(len(values))
    source[indices] = len(values) + np.arange(len(indices))
    if isinstance(values, Sequence):
        both = [*values, *new]
        return [both[index] for index in source]
    if isinstance(values, torch.Tensor):
        return torch.cat([values, torch.as_tensor(new, device=values.device)])[source]
    return np.concatenate([values, np.asarray(new)])[source]  # of a dtype that holds both


def unaugmented(dataset: Any) -> Any:
    """The same samples without augmentation, if the dataset has a method for it; else the dataset, which is said."""
    plain = optional(dataset, "without_augmentation")
    if plain is not None:
        other = plain()
        if other is None or other is dataset:
            raise DataError(
                f"{type(dataset).__name__}.without_augmentation() returned {other!r}: return another dataset, such as "
                "a copy, which is not augmented"
            )
        if length_of(other) == length_of(dataset):
            return other
        log.warning(
            "%s.without_augmentation() is not used: it returned %s of %s samples; define it so that it returns all of "
            "them, or the validation samples are augmented as the training samples are",
            type(dataset).__name__,
            length_of(other),
            length_of(dataset),
        )
        return dataset
    log.info(
        "%s has no without_augmentation(): if it augments its training samples, the validation samples that are split "
        "off them are augmented too",
        type(dataset).__name__,
    )
    return dataset


def undivided(dataset: Any) -> Any:
    """The dataset that subsets are parts of."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def split(dataset: Any, choice: float | Fold) -> tuple[Any, Any]:
    """Splits the dataset into (training samples, validation samples), each in the dataset's order.

    choice: this fraction (0..1) of the samples validates, or this fold; with 0 none does. These samples are not
    augmented. Invariant: a sample's side follows from what it is (`identities`), so it stays there when others come,
    go or move, and a larger fraction adds to the validation samples. So sizes are random: a part meant to have n
    samples has about n plus or minus the root of n. A dataset may have `is_val`, bool (N,), which names the
    validation samples; `val_groups`, (N,): samples of a group are never separated; `stratify`: see `choose`. A
    mixture's parts are split one by one. Raises DataError if the dataset cannot be split so.
    """
    split_parts = optional(dataset, "split_parts")
    if split_parts is not None:
        if isinstance(choice, Fold) and not isinstance(dataset, ConcatDataset):
            raise DataError(
                f"{setting_of(choice)}: {type(dataset).__name__}.split_parts(fraction) takes a share: set "
                "data.val_fraction in its place"
            )
        return split_parts(choice)
    is_val = optional(dataset, "is_val")
    if is_val is None:
        if not choice:
            return dataset, Subset(dataset, np.arange(0))
        is_val = choose(dataset, choice)
    elif choice:
        kind = type(undivided(dataset)).__name__
        raise DataError(
            f"{setting_of(choice)}: {kind} has validation samples already, by `is_val` (a table by data.split): leave "
            "one of them out"
        )
    if is_val.all():
        raise DataError(
            f"all {len(dataset)} samples of {type(undivided(dataset)).__name__} validate: none is trained on"
        )
    training = Subset(dataset, np.flatnonzero(~is_val))
    return training, Subset(unaugmented(dataset), np.flatnonzero(is_val))


def setting_of(choice: float | Fold) -> str:
    return f"data.folds={choice.folds}" if isinstance(choice, Fold) else f"data.val_fraction={choice}"


def choose(dataset: Any, choice: float | Fold) -> np.ndarray:
    """Chooses the validation samples: bool (N,).

    The hash of a sample, or of its group, decides. With `stratify` it does so in each class; a group counts for the
    class of its first sample.
    """
    count = len(dataset)
    if not isinstance(choice, Fold) and (count < 2 or not 0 < choice < 1):
        raise DataError(f"{setting_of(choice)} of {count} samples: give a share below 1, of 2 or more")
    groups = optional(dataset, "val_groups")
    hashes = identities(dataset, log.info) if groups is None else hashed(groups)
    classes = np.zeros(count, int)
    if optional(dataset, "stratify"):
        labels = optional(dataset, "labels")
        classes = np.asarray(labels)
        if classes.shape not in ((count,), (count, 1)) or classes.dtype.kind not in "iu":
            form = "none" if labels is None else f"{classes.dtype} {classes.shape}"
            raise DataError(
                f"data.stratify=true needs `labels`, an integer per sample, and there are {form}: give such labels, "
                "or set it to false"
            )
        classes = classes.reshape(-1)
    hashes, firsts, group_of_sample = np.unique(hashes, return_index=True, return_inverse=True)
    numbers = (hashes >> 11) * 2.0**-53  # from 0 to below 1, in rising order
    _, class_of_group, sizes = np.unique(classes[firsts], return_inverse=True, return_counts=True)
    by_class = np.split(np.argsort(class_of_group, kind="stable"), np.cumsum(sizes)[:-1])  # in each class by number
    if isinstance(choice, Fold):
        is_chosen = fold_of_groups(choice.folds, numbers, by_class) == choice.fold
    else:
        is_chosen = groups_below(choice, numbers, by_class, np.bincount(class_of_group[group_of_sample]))
    return is_chosen[group_of_sample]


def groups_below(
    fraction: float, numbers: np.ndarray, by_class: Sequence[np.ndarray], samples: np.ndarray
) -> np.ndarray:
    """Whether the number of each group is below the fraction: bool (groups,). samples: how many each class has.

    If that leaves a side of a class empty, the group that is nearest to it changes sides, unless the class should have
    less than half a validation sample.
    """
    is_chosen = numbers < fraction
    for groups, count in zip(by_class, samples, strict=True):
        has_room = len(groups) > 1 and (len(by_class) == 1 or fraction * count >= 0.5)
        if is_chosen[groups].all():
            is_chosen[groups[-1]] = False
        elif has_room and not is_chosen[groups].any():
            is_chosen[groups[0]] = True
    if not is_chosen.any():
        lowest = [groups[0] for groups in by_class if len(groups) > 1]
        if not lowest:
            raise DataError(f"data.val_fraction={fraction}: each class has one sample or group, which is trained on")
        is_chosen[min(lowest)] = True
    return is_chosen


def fold_of_groups(folds: int, numbers: np.ndarray, by_class: Sequence[np.ndarray]) -> np.ndarray:
    """The fold of each group, by its number: int64 (groups,).

    A class with at least as many groups as folds has one in each: the fold that has the most of them gives its first
    one to a fold that has none.
    """
    if len(numbers) < folds:
        raise DataError(f"data.folds={folds} of {len(numbers)} samples or groups: give fewer folds")
    fold_of_group = (numbers * folds).astype(int)
    for groups in by_class:
        counts = np.bincount(fold_of_group[groups], minlength=folds)
        while len(groups) >= folds and not counts.all():
            of_largest = groups[fold_of_group[groups] == counts.argmax()]
            fold_of_group[of_largest[0]] = counts.argmin()
            counts = np.bincount(fold_of_group[groups], minlength=folds)
    if len({*fold_of_group.tolist()}) < folds:
        raise DataError(
            f"data.folds={folds}: no class has a sample or group for each fold, and one would have none: give fewer "
            "folds, or data.stratify=false"
        )
    return fold_of_group


def identities(dataset: Any, say: Callable[..., None] = log.debug) -> np.ndarray:
    """A hash of what each sample is: uint64 (N,).

    That is its entry in `sample_ids()`, or else the end of its `path` (see `ends_of`), or else its group, which stays
    on one side of a split, or else its position. `say` logs which. Samples with equal names, such as two rows of one
    file, have equal hashes.
    """
    if isinstance(dataset, Subset):
        return identities(dataset.dataset, say)[dataset.indices]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([identities(part, say) for part in dataset.datasets])
    kind = type(dataset).__name__
    count = len(dataset)
    sample_ids = optional(dataset, "sample_ids")
    path = optional(dataset, "path")
    groups = optional(dataset, "val_groups")
    values = np.arange(count) if groups is None else groups
    known_by = "val_groups"
    if groups is None:
        known_by = (
            "their positions, which change when samples come or go, as it has no sample_ids() and no path(index) with "
            "different names"
        )
    if sample_ids is not None:
        with explained(
            f"{kind}.sample_ids() cannot be used",
            "return an array with what identifies each sample, (N,) or (N, ...), or rename the method",
        ):
            values = np.asarray(sample_ids())
            if values.shape[:1] != (count,):
                raise ValueError(f"it returned {values.dtype} {values.shape} for {count} samples")
        known_by = "sample_ids()"
    elif path is not None:
        ends = ends_of([str(path(index)) for index in range(count)])
        if len({*ends}) > 1 or count == 1:
            values = np.array(ends, object)
            known_by = f"the ends of their paths, such as {ends[0]}"
    say("the validation set: the samples of %s are known by %s", kind, known_by)
    return hashed(values)


def ends_of(paths: Sequence[str]) -> list[str]:
    """Of each path the shortest end, at least "FOLDER/FILE", that no other one has; else the whole path.

    It stays the same if the folder of all samples is moved, or if the paths that are added have other ends.
    """
    paths = [os.path.normpath(path).replace("\\", "/") for path in paths]
    ends = paths.copy()
    left: Sequence[int] = range(len(paths))
    parts = 2
    while left:
        path_of = dict[str, str | None]()  # by its end; None: several paths have it
        for index in left:
            path = paths[index]
            end = ends[index] = "/".join(path.rsplit("/", parts)[-parts:])
            if path_of.setdefault(end, path) != path:
                path_of[end] = None
        left = [index for index in left if path_of[ends[index]] is None and ends[index] != paths[index]]
        parts += 1
    return ends


def hashed(values: Any) -> np.ndarray:
    """A hash of each value, uint64 (N,), the same one everywhere. values: texts, bytes, numbers or rows (N, ...)."""
    array = np.asarray(values)
    are_bytes = array.ndim > 1 and array.dtype.kind not in "OSU"  # whose bytes are addresses, or padded to the longest
    digests = bytearray()
    for start in range(0, len(array), BLOCK):
        block = array[start : start + BLOCK]
        items = [row.tobytes() for row in block] if are_bytes else block.tolist()
        for item in items:
            content = item if isinstance(item, bytes) else str(item).encode(errors="surrogateescape")
            digests += blake2b(content, digest_size=8).digest()
    return np.frombuffer(digests, "<u8")


def sketch(dataset: Any) -> torch.Tensor:
    """A few of the dataset's identities, hashed again: the lowest ones, int64 (at most KEPT,). See `count_shared`."""
    return torch.from_numpy(np.sort(Random(identities(dataset)).key.view(np.int64))[:KEPT])


def count_shared(dataset: Any, earlier: torch.Tensor) -> tuple[int, int]:
    """How many of the dataset's samples are in the set with this sketch, and how many are not.

    Of a set that has more than KEPT only the part that its sketch has: `estimated` gives the number of all.
    """
    keys = Random(identities(dataset)).key.view(np.int64)
    if len(earlier) == KEPT:
        keys = keys[keys <= int(earlier[-1])]
    known = int(np.isin(keys, earlier.numpy()).sum())
    return known, len(keys) - known


def estimated(count: int, earlier: torch.Tensor) -> int:
    """Estimates a number of samples from that of the part that the sketch has."""
    share = (int(earlier[-1]) + 2**63) / 2**64 if len(earlier) == KEPT else 1.0  # of all keys
    return round(count / share)
