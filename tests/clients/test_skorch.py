"""skorch builds its iterators itself: iterator_train=WorkerLoader, with settings by prefix."""

import pytest

skorch = pytest.importorskip("skorch")

import numpy as np
import torch
from points import BATCH_SIZE, LENGTH, SEED

from loaders import WorkerLoader


def test_predictions_by_workers_are_those_of_the_module_in_order():
    inputs = np.stack([np.arange(LENGTH), np.ones(LENGTH)], axis=1).astype(np.float32)
    workers = {"num_workers": 2, "seed": SEED}
    settings = {f"iterator_{part}__{name}": value for part in ("train", "valid") for name, value in workers.items()}
    settings |= {"iterator_train": WorkerLoader, "iterator_valid": WorkerLoader, "iterator_train__shuffle": True}
    net = skorch.NeuralNetRegressor(
        torch.nn.Linear(2, 1), max_epochs=2, lr=1e-4, batch_size=BATCH_SIZE, train_split=None, verbose=0, **settings
    )
    found = net.fit(inputs, inputs[:, :1] % 2).predict(inputs)
    torch.testing.assert_close(torch.from_numpy(found), net.module_(torch.from_numpy(inputs)).detach())
