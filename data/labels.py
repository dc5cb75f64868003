"""Converts labels, numbers or names, to indices of the classes."""

from collections.abc import Callable

import numpy as np

from data.errors import DataError


def class_indices(values: np.ndarray, classes: np.ndarray, path: Callable[[int], str], remedy: str) -> np.ndarray:
    """The index in `classes` (K,) of each of `values` (N,), the samples' labels: int64 (N,).

    Raises DataError for a label that is not a class: a sentence with the sample's `path(index)` that ends in `remedy`.
    """
    if values.dtype.kind != classes.dtype.kind:  # a number matches the name that has its digits
        values, classes = values.astype(str), classes.astype(str)
    order = np.argsort(classes)
    nearest = order[np.searchsorted(classes, values, sorter=order).clip(max=len(classes) - 1)]
    if (unknown := np.flatnonzero(classes[nearest] != values)).size:
        first = int(unknown[0])
        raise DataError(
            f"{path(first)} has the label {values[first]}, which is not one of the {len(classes)} classes; {remedy}"
        )
    return nearest
