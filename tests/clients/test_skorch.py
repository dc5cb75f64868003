"""skorch, which builds its iterators itself: iterator_train=WorkerLoader, with settings by prefix."""

import pytest

skorch = pytest.importorskip("skorch")

import numpy as np
import torch
from points import BATCH_SIZE, LENGTH, SEED, check_epochs, seeded_epoch

from loaders import Preloader, WorkerLoader

X = np.stack([np.arange(LENGTH), np.ones(LENGTH)], axis=1).astype(np.float32)
Y = X[:, :1] % 2


class Records(skorch.callbacks.Callback):
    """Which samples each training batch of each epoch had."""

    def __init__(self) -> None:
        self.epochs: list[list[list[int]]] = []

    def on_epoch_begin(self, net, **_) -> None:
        self.epochs.append([])

    def on_batch_begin(self, net, batch, training, **_) -> None:
        if training:
            x, y = batch
            assert torch.equal(y, x[:, :1] % 2)
            self.epochs[-1].append(x[:, 0].long().tolist())


def preloader(dataset, **settings) -> Preloader:
    return Preloader(WorkerLoader(dataset, **settings), "cpu")


def regressor(records: Records, iterator=WorkerLoader, **settings) -> "skorch.NeuralNetRegressor":
    settings = {"shuffle": True, "num_workers": 2, "persistent_workers": True, "seed": SEED, **settings}
    return skorch.NeuralNetRegressor(
        torch.nn.Linear(2, 1),
        max_epochs=3,
        lr=1e-4,
        batch_size=BATCH_SIZE,
        train_split=None,
        verbose=0,
        callbacks=[("records", records)],
        iterator_train=iterator,
        **{f"iterator_train__{name}": value for name, value in settings.items()},
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"persistent_workers": False}, {"iterator": preloader}],
    ids=["persistent", "new_each_epoch", "preloader"],
)
def test_with_a_seed_fitting_gets_the_order_of_each_epoch(settings):
    net = regressor(Records(), **settings).fit(X, Y)
    assert net.callbacks_[-2][1].epochs == [seeded_epoch(epoch) for epoch in range(3)]


@pytest.mark.parametrize("persistent", [False, True])
def test_without_a_seed_fitting_gets_every_sample_once_an_epoch(persistent):
    records = Records()
    regressor(records, seed=None, persistent_workers=persistent).fit(X, Y)
    check_epochs(records.epochs)


def test_predictions_by_workers_are_those_of_the_module_in_order():
    net = regressor(Records(), seed=None)
    net.set_params(iterator_valid=WorkerLoader, iterator_valid__num_workers=2, iterator_valid__seed=SEED)
    found = net.fit(X, Y).predict(X)
    torch.testing.assert_close(torch.from_numpy(found), net.module_(torch.from_numpy(X)).detach())
