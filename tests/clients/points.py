"""A small dataset whose batches tell which samples are in them, loaders of it, and the order that they promise."""

from typing import Any

import torch
from torch.utils.data import Dataset

from loaders import Preloader, WorkerLoader

LENGTH = 22  # the last batch is a short one
BATCH_SIZE = 4
SEED = 7


class Points(Dataset):
    """Sample i is {"x": [i, 1], "labels": i % 2}; `x` in float32."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([index, 1.0]), "labels": index % 2}


def seeded(**settings: Any) -> WorkerLoader:
    settings = {"shuffle": True, "num_workers": 2, "persistent_workers": True, "seed": SEED, **settings}
    return WorkerLoader(Points(), BATCH_SIZE, **settings)


KINDS = {
    "seeded": seeded,
    "preloader": lambda: Preloader(seeded(), "cpu", 3),
    "unseeded": lambda: seeded(seed=None, persistent_workers=False),
}


def indices(batch: dict[str, torch.Tensor]) -> list[int]:
    """Which samples of Points are in the batch; checks that each is whole."""
    numbers = batch["x"][:, 0].long()
    assert torch.equal(batch["x"][:, 1], torch.ones(len(numbers))) and torch.equal(batch["labels"], numbers % 2)
    return numbers.tolist()


def seeded_epoch(epoch: int, length: int = LENGTH, **settings: Any) -> list[list[int]]:
    """The shuffled batches of this epoch under SEED, by a loader without workers that goes straight to it."""
    loader = WorkerLoader(range(length), BATCH_SIZE, shuffle=True, seed=SEED, **settings)
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


def check_epochs(epochs: list[list[list[int]]], length: int = LENGTH) -> None:
    """Each epoch has every sample once, and no two have the same order."""
    orders = [[index for batch in batches for index in batch] for batches in epochs]
    for order in orders:
        assert sorted(order) == list(range(length))
    assert len(set(map(tuple, orders))) == len(orders), "two epochs have the same order"
