"""Hugging Face's map-style Dataset, read by worker processes and threads; it answers a whole batch at once."""

import pytest

datasets = pytest.importorskip("datasets")

import torch
from points import BATCH_SIZE, LENGTH, SEED, check_epochs, epoch_of, seeded_epoch
from torch.utils.data import DataLoader

from loaders import LoaderConfig, WorkerLoader, build_loader


@pytest.fixture
def points():
    columns = {"x": [[float(index), 1.0] for index in range(LENGTH)], "labels": [i % 2 for i in range(LENGTH)]}
    return datasets.Dataset.from_dict(columns).with_format("torch")


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_a_seed_every_epoch_has_its_order(points, num_workers, method):
    settings = {"num_workers": num_workers, "worker_method": method, "persistent_workers": True}
    with WorkerLoader(points, BATCH_SIZE, shuffle=True, seed=SEED, **settings) as loader:
        assert [epoch_of(loader) for _ in range(3)] == [seeded_epoch(epoch) for epoch in range(3)]


@pytest.mark.parametrize("persistent", [False, True])
def test_without_a_seed_batches_are_those_of_a_stock_loader(points, persistent):
    def epochs(cls) -> list[list[list[int]]]:
        torch.manual_seed(2)
        loader = cls(points, BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=persistent)
        return [epoch_of(loader) for _ in range(3)]

    check_epochs(epochs(WorkerLoader))
    assert epochs(WorkerLoader) == epochs(DataLoader)


@pytest.mark.parametrize("name", ["prefetch", "resident", "threads", "torch", "workers"])
def test_every_loader_that_a_config_names_reads_it(points, name):
    settings = {"batch_size": BATCH_SIZE, "seed": SEED, "shuffle": True}
    with build_loader(LoaderConfig(name, num_workers=2), points, **settings) as loader:
        assert [epoch_of(loader) for _ in range(2)] == [seeded_epoch(epoch) for epoch in range(2)]


@pytest.mark.parametrize("seed", [None, SEED])
def test_a_transform_of_the_dataset_runs_in_the_workers_on_batches(points, seed):
    def doubled(batch: dict[str, list]) -> dict[str, torch.Tensor]:
        assert torch.utils.data.get_worker_info() is not None
        return {"x": torch.tensor(batch["x"]) * 2, "of": torch.full((len(batch["x"]),), len(batch["x"]))}

    points = points.with_transform(doubled)
    with WorkerLoader(points, BATCH_SIZE, num_workers=2, seed=seed) as loader:
        batches = list(loader)
    assert torch.cat([batch["x"] for batch in batches])[:, 0].tolist() == [2.0 * index for index in range(LENGTH)]
    if seed is None:  # with one, samples are read one by one, each with its own random numbers
        assert [set(batch["of"].tolist()) for batch in batches] == [{4}, {4}, {4}, {4}, {4}, {2}]
