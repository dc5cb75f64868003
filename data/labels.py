"""Labels as a source has them, numbers or names, become the classes' indices."""

import numpy as np


def class_indices(values: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The index in `classes` (K,) of each of `values` (N,): int64 (N,), -1 for a value that is not among them."""
    if values.dtype.kind != classes.dtype.kind:  # a number is found among names by its digits
        values, classes = values.astype(str), classes.astype(str)
    order = np.argsort(classes)
    nearest = order[np.searchsorted(classes, values, sorter=order).clip(max=len(classes) - 1)]
    return np.where(classes[nearest] == values, nearest, -1)
