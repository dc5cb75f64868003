"""fastai's Learner over our loaders, which its DataLoaders take as they take torch's."""

import pytest

pytest.importorskip("fastai.callback.progress")  # it gives a Learner no_bar()

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from points import BATCH_SIZE, LENGTH, SEED, check_epochs, seeded_epoch

from loaders import WorkerLoader


class Pairs(torch.utils.data.Dataset):
    """Sample i is ([i, 1], i % 2)."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([index, 1.0]), torch.tensor([index % 2.0])


class Records(Callback):
    def __init__(self) -> None:
        self.epochs: list[list[list[int]]] = []

    def before_epoch(self) -> None:
        self.epochs.append([])

    def before_batch(self) -> None:
        if self.training:
            self.epochs[-1].append(self.xb[0][:, 0].long().tolist())


@pytest.mark.parametrize("seed", [None, SEED])
def test_a_learner_gets_every_sample_once_an_epoch(seed):
    settings = {"num_workers": 2, "persistent_workers": True, "seed": seed}
    with (
        WorkerLoader(Pairs(), BATCH_SIZE, shuffle=True, **settings) as train,
        WorkerLoader(Pairs(), BATCH_SIZE, **settings) as valid,
    ):
        records = Records()
        learner = Learner(DataLoaders(train, valid), torch.nn.Linear(2, 1), torch.nn.MSELoss(), cbs=[records])
        with learner.no_bar(), learner.no_logging():
            learner.fit(3, lr=1e-4)
        check_epochs(records.epochs)
        if seed is not None:
            assert records.epochs == [seeded_epoch(epoch) for epoch in range(3)]
