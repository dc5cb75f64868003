"""Small datasets that show what a loader did with them."""

import random

import numpy as np
import torch


class Numbers:
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Faulty(Numbers):
    """Sample i is i, but reading one of `bad` raises."""

    def __init__(self, length: int, *bad: int) -> None:
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return index


class Augmented(Numbers):
    """Sample i is i and a draw from each of the three global generators that augmentations use."""

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), np.random.random(), torch.rand(()).item()]


def contents(batches) -> list:
    """Batches of numbers as nested lists."""
    return [batch.tolist() for batch in batches]
