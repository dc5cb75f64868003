"""Reads batches as loaders do."""

from typing import Any

import numpy as np
import pytest
import torch

from data.errors import DataError
from loaders import Random
from training.config import ConfigError


class Given:
    """A loader's `random` with given numbers: a row for each sample."""

    def __init__(self, *rows: Any) -> None:
        self.rows = np.array(rows)

    def uniform(self, k: int) -> np.ndarray:
        assert self.rows.shape[1:] == (k,) or not len(self.rows)
        return self.rows


def refused(words: str) -> Any:
    """Checks that the block raises a DataError or a ConfigError: a sentence that matches `words`."""
    return pytest.raises((DataError, ConfigError), match=words)


def read_batch(dataset: Any, indices: Any, random: Any = None) -> dict[str, torch.Tensor]:
    """The samples at `indices`, or the first ones if that is their number, through the dataset's `read_batch`."""
    indices = np.arange(indices) if isinstance(indices, int) else np.asarray(indices)
    count = len(indices)
    spec = dataset.sample_spec()
    out = {name: torch.zeros((count, *shape), dtype=dtype) for name, (shape, dtype) in spec.items()}
    dataset.read_batch(indices, out, random or Random(0, 0, np.arange(count), indices))
    return out


def paths(dataset: Any) -> list[str]:
    """The file of each sample."""
    return [dataset.path(index) for index in range(len(dataset))]


def assert_equal_batches(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(field, theirs[name]) for name, field in ours.items())


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Kolmogorov and Smirnov's distance between the distributions of two samples, 0 to 1."""
    values = np.unique(np.concatenate([ours, theirs]))
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (ours, theirs)]
    return float(np.abs(shares[0] - shares[1]).max())
