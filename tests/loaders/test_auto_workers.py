"""WorkerLoader(num_workers="auto"); what number it chooses is tested in workers/test_autotune.py."""

import copy

import pytest
import torch
from example_datasets import Augmented, Numbers, contents

from loaders import Preloader, WorkerLoader


class Scripted:
    """In place of a Tuner: another number of workers for each batch."""

    changes = 0

    def __init__(self, most: int) -> None:
        self.most, self.workers = most, 1
        self.new_workers: set[int] = set()

    def delivered(self, *args, **kwargs) -> None:
        self.workers = self.workers % self.most + 1


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_batches_are_equal_while_the_number_of_workers_changes(monkeypatch, method):
    monkeypatch.setattr("loaders.worker_loader.available_cores", lambda: 3)
    monkeypatch.setattr("loaders.worker_loader.Tuner", Scripted)
    settings = {"batch_size": 4, "shuffle": True, "seed": 3, "collate_fn": torch.tensor}
    dataset = Augmented(50) if method == "multiprocessing" else Numbers(50)
    expected = WorkerLoader(dataset, **settings)
    auto = {"num_workers": "auto", "prefetch_factor": "auto", "persistent_workers": True, "worker_method": method}
    with WorkerLoader(dataset, **settings, **auto) as loader:
        for _ in range(2):
            assert contents(loader) == contents(expected)
        assert loader.num_workers == 3


def test_with_auto_one_worker_is_started_and_more_when_they_are_wanted(monkeypatch):
    monkeypatch.setattr("loaders.worker_loader.available_cores", lambda: 3)
    monkeypatch.setattr("loaders.worker_loader.Tuner", Scripted)
    with WorkerLoader(Numbers(100), batch_size=1, seed=0, num_workers="auto", persistent_workers=True) as loader:
        epoch = iter(loader)
        assert len(epoch._workers) == 1
        list(epoch)
        assert len(iter(loader)._workers) == 3


def test_workers_are_added_from_a_preloaders_thread_too(monkeypatch):
    monkeypatch.setattr("loaders.worker_loader.available_cores", lambda: 2)
    monkeypatch.setattr("loaders.worker_loader.Tuner", Scripted)
    loader = WorkerLoader(Numbers(40), batch_size=4, seed=0, num_workers="auto", persistent_workers=True)
    with Preloader(loader, device="cpu", depth=2) as batches:
        assert contents(batches) == contents(WorkerLoader(Numbers(40), batch_size=4, seed=0))
        assert len(iter(loader)._workers) == 2


def test_auto_is_refused_without_a_seed_and_any_other_word_always():
    for settings in ({"num_workers": "auto"}, {"num_workers": 1, "prefetch_factor": "auto"}):
        with pytest.raises(ValueError, match=r"'auto': give a number, or 'auto' if there is a seed"):
            WorkerLoader(Numbers(10), **settings)
    with pytest.raises(ValueError, match="num_workers='many': give a number, or 'auto'"):
        WorkerLoader(Numbers(10), num_workers="many", seed=0)


def test_batches_loaded_ahead_with_auto_take_an_eighth_of_the_memory(monkeypatch):
    monkeypatch.setattr("loaders.worker_loader.available_cores", lambda: 2)
    monkeypatch.setattr("loaders.workers.engine.available_memory", lambda: 8 * 4 * 4096)  # four slots of a page
    settings = {"batch_size": 1, "seed": 0, "prefetch_factor": "auto", "persistent_workers": True}
    with WorkerLoader(Numbers(100), num_workers=2, **settings) as loader:
        engine = iter(loader)._source.engine
        assert engine._depth(2) == 2  # the size of a batch is not known yet
        next(loader)
        assert engine._depth(2) == 4
        assert engine._depth(8) == 8  # at least one for each worker


def test_a_copy_of_the_loader_has_a_tuner_of_its_own():
    loader = WorkerLoader(Numbers(10), num_workers="auto", seed=0)
    assert copy.copy(loader)._added.tuner is not loader._added.tuner
