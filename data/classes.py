"""Classes by name: a dataset's labels become the numbers that a network knows its classes by.

Invariant: classes are compared by their names, never by their numbers. Names that differ only in upper and lower case,
or in how Unicode writes an accent, are equal, unless the network has several of them (`alike`), which stay apart.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from torch.utils.data import IterableDataset

from data import optional
from data.errors import DataError
from data.subset import Subset, Wrapper, if_offered

log = logging.getLogger(__name__)

SHOWN = 20  # names that a sentence lists
NUMBERS = 4  # up to which a label is shown, and not its form


def with_classes(
    dataset: Any,
    classes: Sequence[str] | None,
    owner: str,
    name: str,
    label: str = "label",
    leaves_out: bool = False,
    is_multilabel: bool = False,
    remedy: str = "give data with these names",
) -> Any:
    """The dataset with its labels as numbers of `classes`. It is returned unchanged if its classes have this order.

    classes: those of the network, or of whatever `owner` names; None: not known, so nothing is translated.
    name: of the dataset. label: the labels' field; in a sample without names it is the last one. is_multilabel:
    whether the task takes integers as a value per class. remedy: what to do about samples of another class.
    The dataset may have a part of the classes. Raises DataError with both lists if it has samples of another class,
    unless `leaves_out`: then these samples are left out, which is said, or refused when read if it has no `labels`.
    """
    names = optional(dataset, "classes")
    if not names or not classes:
        return dataset
    numbers = numbers_in(classes, names)
    unknown = np.flatnonzero(numbers < 0)
    is_stream = isinstance(dataset, IterableDataset)
    labels = None if is_stream else optional(dataset, "labels")
    if labels is not None:
        labels = np.asarray(labels)
        if labels.dtype.kind in "iu" and labels.size == len(labels):
            unknown = np.intersect1d(unknown, labels)  # folders without images are no reason to stop
            if leaves_out and len(unknown):
                dataset = Subset(dataset, np.flatnonzero(~np.isin(labels.reshape(-1), unknown)))
    others = listed([names[number] for number in unknown])
    if len(unknown) and not leaves_out:
        raise DataError(
            f"{name} has classes that {owner} does not have, {others}: its classes are {listed(names)}, those of "
            f"{owner} are {listed(classes)}; {remedy}"
        )
    if len(unknown):
        log.warning("%s has classes that %s does not have, which are left out: %s", name, owner, others)
    if np.array_equal(numbers, np.arange(len(classes))):
        return dataset
    translation = Labels(names, classes, is_multilabel or optional(dataset, "fits_task") == "multilabel")
    return (RelabelledStream if is_stream else Relabelled)(dataset, translation, label)


def numbers_in(classes: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """The number in `classes` of each name, int64 (K,); -1 if it is not there.

    Equal names, as ImageNet's two cranes, are told apart by their order, if both have as many of them.
    """
    ours = Counter(classes)
    theirs = Counter(names)
    numbers = {entry: number for number, entry in enumerate(counted(classes)) if theirs[entry[0]] == ours[entry[0]]}
    folded: dict[str, int] = {}
    for number, name in enumerate(classes):
        is_new = folding(name) not in folded
        folded[folding(name)] = number if is_new else -1  # a and A are two classes here
    found = []
    for name, before in counted(names):
        other = folded.get(folding(name), -1) if theirs[name] == 1 else -1
        found.append(numbers.get((name, before), other))
    return np.array(found, np.int64)


def counted(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each name, and how often it stood before."""
    counts: Counter[str] = Counter()
    entries = []
    for name in names:
        entries.append((name, counts[name]))
        counts[name] += 1
    return entries


def are_same(classes: Sequence[str], others: Sequence[str]) -> bool:
    """Whether both have the same names, in any order."""
    return sorted(numbers_in(classes, others)) == list(range(len(classes)))


def alike(classes: Sequence[str]) -> list[str]:
    """The names that differ from another one only in case or in how an accent is written."""
    counts = Counter(map(folding, {*classes}))
    return [name for name in dict.fromkeys(classes) if counts[folding(name)] > 1]


def lists_among(classes: Sequence[str]) -> list[str]:
    """The names that seem to be lists of other classes, as a|b beside a and b is: all parts are in other names too.

    Spaces separate parts that are classes, in two names or more: ice cream alone may be a class beside ice and cream.
    """
    for separator in "|;,":
        parts = {name: {part.strip() for part in name.split(separator)} for name in classes}
        counts = Counter(part for each in parts.values() for part in each)
        found = [name for name in parts if len(parts[name]) > 1 and all(counts[part] > 1 for part in parts[name])]
        if found:
            return found
    found = [name for name in classes if " " in name and {*name.split()} <= {*classes}]
    return found if len(found) > 1 else []


def folding(name: str) -> str:
    return normalize("NFC", normalize("NFC", name).casefold())


def listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names):,} in all)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def label_text(label: Any, classes: Sequence[str]) -> str:
    """A label for a reader: the name of its class, those of several with their shares, largest first, or numbers.

    Of other labels, such as masks, it is their form; of None it is empty.
    """
    if label is None:
        return ""
    array = np.asarray(label)
    if array.shape == (len(classes),):
        shares = sorted(zip(array.tolist(), classes, strict=True), key=lambda pair: -pair[0])
        texts = [f"{name} {share:.0%}" if share < 1 else name for share, name in shares if share > 0]
        return ", ".join(texts) or "no class"
    if array.shape == () and array.dtype.kind in "iu" and 0 <= array < len(classes):
        return classes[int(array)]
    if array.size <= NUMBERS:
        numbers = array.reshape(-1).tolist()
        return ", ".join(f"{number:.7g}" if isinstance(number, float) else str(number) for number in numbers)
    return f"{array.dtype} {array.shape}"


class Labels:
    """Translates labels, the numbers of `names`, to those of `classes`."""

    def __init__(self, names: Sequence[str], classes: Sequence[str], is_multilabel: bool) -> None:
        self.names = names
        self.classes = tuple(classes)
        self.is_multilabel = is_multilabel
        self.numbers = numbers_in(classes, names)  # int64 (K,); -1: it is refused

    def translate(self, labels: Any, sample_dims: int = 0) -> Any:
        """Labels that are numbers of classes, () or (1,) for each sample, or have a value per class, (K,).

        Integers (K,) are values per class only if `is_multilabel`: they may be the numbers of K classes.
        sample_dims: the number of dimensions before these. A number that is no place in `names` or `classes` stays as
        it is. Raises DataError for one that is a place in `classes` alone: then numbers are no places in `names`. And
        for values that some of `classes` would not have: they are not known to be 0.
        """
        array = np.asarray(labels)
        shape = array.shape[sample_dims:]
        number_of_classes = len(self.numbers)
        if shape in ((), (1,)) and array.dtype.kind in "biu":
            is_class = (array >= 0) & (array < number_of_classes)
            translated = np.where(is_class, self.numbers[np.where(is_class, array, 0).astype(np.int64)], array)
            is_unknown = is_class & (translated < 0)
            translated = translated.astype(np.int64 if array.dtype == bool else array.dtype)
            beyond = (array >= number_of_classes) & (array < len(self.classes))
            if beyond.any():
                raise DataError(
                    f"a label is {array[beyond].flat[0]}, and the dataset has the classes {listed(self.names)}, 0 to "
                    f"{number_of_classes - 1}: `classes` has to have a name for each number from 0 on, also for those "
                    "that no sample has"
                )
        elif shape == (number_of_classes,) and (self.is_multilabel or array.dtype.kind not in "iu"):
            is_known = self.numbers >= 0
            if len({*self.numbers[is_known].tolist()}) < len(self.classes):
                raise DataError(
                    f"labels have a value for each of {listed(self.names)}, and the network has the classes "
                    f"{listed(self.classes)}: give values for all of them"
                )
            translated = np.zeros((*array.shape[:-1], len(self.classes)), array.dtype)
            is_unknown = array[..., ~is_known]
            columns: Any = (..., self.numbers[is_known])
            np.add.at(translated, columns, array[..., is_known])  # two spellings may be one class
        else:
            raise DataError(
                f"labels of {array.dtype} {shape} cannot be translated to classes in another order: give the dataset "
                "its classes in the order of the network, or labels that are the number of a class, or floats for all"
            )
        if is_unknown.any():
            raise DataError("a sample is of a class that the network does not have: remove it, or give other data")
        if isinstance(labels, torch.Tensor):
            return torch.from_numpy(translated)
        return translated if translated.ndim else translated.item()

    def of_sample(self, sample: Any, field: str) -> Any:
        """The sample with its label translated: the field of this name, or the last one."""
        if isinstance(sample, tuple) and field in getattr(sample, "_fields", ()):
            named: Any = sample  # a namedtuple
            return named._replace(**{field: self.translate(getattr(named, field))})
        if isinstance(sample, Mapping):
            if field not in sample:
                fields = ", ".join(sample)
                raise DataError(f"a sample has no {field!r}, only {fields}: its class cannot be translated by name")
            return {**sample, field: self.translate(sample[field])}
        make = getattr(sample, "_make", type(sample))  # a namedtuple's, of other names
        return make([*sample[:-1], self.translate(sample[-1])])


class Relabelled(Subset):
    """All samples of a dataset, with their labels as numbers of `classes`: see `with_classes`."""

    def __init__(self, dataset: Any, translation: Labels, label: str) -> None:
        self.classes = translation.classes
        self.field = label
        self.translation = translation
        labels = optional(dataset, "labels")
        if labels is not None:
            self.labels = self.translation.translate(np.asarray(labels), 1)
        super().__init__(dataset, np.arange(len(dataset)))

    def __getitem__(self, index: int) -> Any:
        return self.translation.of_sample(super().__getitem__(index), self.field)

    @property
    def read_batch(self) -> Callable[..., None] | None:
        """The dataset's; None if it has none, or if labels have a value per class: `out` has no room for others."""
        if super().read_batch is None:
            return None
        shape, _ = self.dataset.sample_spec().get(self.field, (None, None))
        return self._read_batch if shape in ((), (1,)) else None

    def _read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        super().read_batch(indices, out, random)
        out[self.field].copy_(self.translation.translate(out[self.field], 1))

    @if_offered
    def arrays(self) -> dict[str, np.ndarray]:
        arrays = self.dataset.arrays()
        return {**arrays, self.field: self.translation.translate(arrays[self.field], 1)}


class RelabelledStream(Wrapper, IterableDataset[Any]):
    """A stream with its labels as numbers of `classes`. It has what the stream has, such as `state_dict`."""

    def __init__(self, dataset: Any, translation: Labels, label: str) -> None:
        self.classes = translation.classes
        self.field = label
        self.translation = translation
        self.dataset = dataset  # last: see Wrapper

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __iter__(self) -> Any:
        for sample in self.dataset:
            yield self.translation.of_sample(sample, self.field)
