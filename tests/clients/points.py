"""A small dataset whose batches tell which samples are in them, loaders of it, and the order that they promise."""

import torch
from torch.utils.data import Dataset

from loaders import Preloader, WorkerLoader

LENGTH = 22  # the last batch is a short one
BATCH_SIZE = 4
SEED = 7


class Points(Dataset):
    """Sample i is {"x": [i, 1], "labels": i % 2}; `x` in float32."""

    def __init__(self, length=LENGTH):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": torch.tensor([index, 1.0]), "labels": index % 2}


def seeded(**settings):
    settings = {"shuffle": True, "num_workers": 2, "persistent_workers": True, "seed": SEED, **settings}
    return WorkerLoader(Points(), BATCH_SIZE, **settings)


KINDS = {
    "seeded": seeded,
    "preloader": lambda: Preloader(seeded(), "cpu", 3),
    "unseeded": lambda: seeded(seed=None, persistent_workers=False),
}


def indices(batch):
    """Which samples of Points are in the batch; checks that each is whole."""
    numbers = batch["x"][:, 0].long()
    assert torch.equal(batch["x"][:, 1], torch.ones(len(numbers))) and torch.equal(batch["labels"], numbers % 2)
    return numbers.tolist()


def seeded_epoch(epoch, length=LENGTH, **settings):
    """The shuffled batches of this epoch under SEED, by a loader without workers that goes straight to it."""
    loader = WorkerLoader(range(length), BATCH_SIZE, shuffle=True, seed=SEED, **settings)
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


def check_epochs(epochs, length=LENGTH):
    """Each epoch has every sample once, and no two have the same order."""
    orders = [[index for batch in batches for index in batch] for batches in epochs]
    for order in orders:
        assert sorted(order) == list(range(length))
    assert len(set(map(tuple, orders))) == len(orders), "two epochs have the same order"
