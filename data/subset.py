"""Subset: some samples of a dataset, which can still read whole batches and lie on the device."""

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
    """One that reads whole batches: loaders look for that in the class."""

    def read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        self.dataset.read_batch(self.indices[indices], out, random)


class ArraySubset(BatchSubset):
    """One that is in memory."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array[self.indices] for name, array in self.dataset.arrays().items()}


def subset(dataset: Any, indices: np.ndarray) -> Subset:
    """Makes the subset that offers what the dataset offers."""
    if not has_own(dataset, "read_batch"):
        return Subset(dataset, indices)
    return (ArraySubset if has_own(dataset, "arrays") else BatchSubset)(dataset, indices)


def has_own(dataset: Any, method: str) -> bool:
    """Whether the dataset has this method, and it was not inherited past another `__getitem__`."""
    owners = [
        next((kind for kind in type(dataset).__mro__ if name in vars(kind)), None) for name in (method, "__getitem__")
    ]
    return owners[0] is not None and owners[1] is not None and issubclass(owners[0], owners[1])


def split(dataset: Any, fraction: float) -> tuple[Subset, Subset]:
    """Splits off a random `fraction` (0..1) of the dataset: (the rest, the part), each in the dataset's order.

    The part is not augmented, if the dataset has a method `without_augmentation()` that returns such a one. It is the
    same part each time.
    """
    order = np.random.default_rng(0).permutation(len(dataset))
    size = min(max(1, round(fraction * len(dataset))), len(dataset) - 1)
    plain = dataset.without_augmentation() if hasattr(dataset, "without_augmentation") else dataset
    return subset(dataset, np.sort(order[size:])), subset(plain, np.sort(order[:size]))
