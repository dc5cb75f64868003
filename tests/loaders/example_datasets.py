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


class Noisy(Numbers):
    """Sample i is i and three draws from torch's default generator."""

    def __getitem__(self, index: int) -> dict:
        self.before(index)
        return {"index": index, "noise": torch.rand(3, dtype=torch.float64)}

    def before(self, index: int) -> None:
        """What happens before a sample is read."""


class Written(Noisy):
    """The same through read_batch, which draws from the `random` that it is given."""

    def sample_spec(self) -> dict:
        return {"index": ((), torch.int64), "noise": ((3,), torch.float64)}

    def read_batch(self, indices, out, random) -> None:
        for index in indices.tolist():
            self.before(index)
        out["noise"].copy_(torch.from_numpy(random.uniform(3)))
        out["index"].copy_(torch.from_numpy(indices))


def contents(batches) -> list:
    """Batches of numbers as nested lists."""
    return [batch.tolist() for batch in batches]
