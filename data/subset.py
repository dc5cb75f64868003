"""Subset: some samples of a dataset. If the dataset has `read_batch` and `arrays`, the subset has them too."""

from typing import Any

import numpy as np


class Subset:
    """The samples of `dataset` at `indices`, int64 (N,)."""

    def __init__(self, dataset: Any, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, indices
        for name in ("sample_spec", "augment_batch", "classes", "mean", "std"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        if hasattr(dataset, "labels"):
            self.labels = np.asarray(dataset.labels)[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]


class BatchSubset(Subset):
    """A subset with `read_batch`. A separate class, because loaders look the method up in the class."""

    def read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        self.dataset.read_batch(self.indices[indices], out, random)


class ArraySubset(BatchSubset):
    """A subset with `arrays`, for loader=resident."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array[self.indices] for name, array in self.dataset.arrays().items()}


def subset(dataset: Any, indices: np.ndarray) -> Subset:
    """Returns a subset that offers the same methods as the dataset."""
    if not offers(dataset, "read_batch"):
        return Subset(dataset, indices)
    return (ArraySubset if offers(dataset, "arrays") else BatchSubset)(dataset, indices)


def offers(dataset: Any, method: str) -> bool:
    """Whether the dataset's class has `method`, and it returns the same samples as `__getitem__`.

    If a subclass overrides only `__getitem__`, the inherited method would read other samples: loaders ignore it too.
    """
    if not callable(getattr(dataset, method, None)):  # an instance may have switched it off
        return False
    owner, reader = (_owner(dataset, name) for name in (method, "__getitem__"))
    return owner is not None and reader is not None and issubclass(owner, reader)


def _owner(dataset: Any, name: str) -> type | None:
    """The class that defines the dataset's method `name`; None if there is none, or if it sets it to None."""
    owner = next((kind for kind in type(dataset).__mro__ if name in vars(kind)), None)
    return None if owner is None or vars(owner)[name] is None else owner


def split(dataset: Any, fraction: float) -> tuple[Subset, Subset]:
    """Splits a random `fraction` (0..1) off the dataset: (the rest, the part), each in the dataset's order.

    It is the same part each time. The part is not augmented if the dataset has a method `without_augmentation()`.
    """
    order = np.random.default_rng(0).permutation(len(dataset))
    size = min(max(1, round(fraction * len(dataset))), len(dataset) - 1)
    plain = dataset.without_augmentation() if hasattr(dataset, "without_augmentation") else dataset
    return subset(dataset, np.sort(order[size:])), subset(plain, np.sort(order[:size]))
