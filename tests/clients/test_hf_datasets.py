"""Hugging Face's map-style Dataset, read by worker processes and threads; it answers a whole batch at once."""

import pytest

datasets = pytest.importorskip("datasets")

from points import BATCH_SIZE, LENGTH, SEED, check_epochs, epoch_of, seeded_epoch

from loaders import WorkerLoader


@pytest.fixture
def points():
    columns = {"x": [[float(index), 1.0] for index in range(LENGTH)], "labels": [i % 2 for i in range(LENGTH)]}
    return datasets.Dataset.from_dict(columns).with_format("torch")


@pytest.mark.parametrize("settings", [{"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}, {}], ids=str)
@pytest.mark.parametrize("seed", [None, SEED])
def test_every_epoch_has_its_order(points, settings, seed):
    with WorkerLoader(points, BATCH_SIZE, shuffle=True, seed=seed, **settings) as loader:
        epochs = [epoch_of(loader) for _ in range(2)]
    check_epochs(epochs)
    assert seed is None or epochs == [seeded_epoch(epoch) for epoch in range(2)]
