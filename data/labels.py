"""Converts labels, numbers or names, to indices of the classes."""

import numpy as np


def class_indices(values: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The index in `classes` (K,) of each of `values` (N,): int64 (N,), -1 for a value that is not a class."""
    if values.dtype.kind != classes.dtype.kind:  # a number matches the name that has its digits
        values, classes = values.astype(str), classes.astype(str)
    order = np.argsort(classes)
    nearest = order[np.searchsorted(classes, values, sorter=order).clip(max=len(classes) - 1)]
    return np.where(classes[nearest] == values, nearest, -1)
