"""What is particular to CachedLoader; what all loaders promise is in test_contract.py."""

import logging

import pytest
from example_datasets import Numbers, contents

from loaders import LoaderConfig, TorchLoader, build_loader
from loaders.cached_loader import COUNT, CachedLoader
from loaders.order import Order


@pytest.fixture
def make(closed_later):
    def make(dataset, batch_size: int = 2, **order) -> CachedLoader:
        order = {"shuffle": True, **order}
        return closed_later(CachedLoader(TorchLoader(dataset, batch_size, **order), batch_size, **order))

    return make


def epoch_of(number: int, length: int, batch_size: int = 2) -> list[list[int]]:
    return [rows.tolist() for _, _, rows in Order(length, batch_size, True, 0).batches(number)]


def test_the_first_full_batches_of_the_first_epoch_come_again_and_again(make):
    for length, epoch in ((50, 0), (50, 3), (7, 0)):
        loader = make(Numbers(length))
        loader.set_epoch(epoch)
        first = [batch for batch in epoch_of(epoch, length)[:COUNT] if len(batch) == 2]
        for _ in range(2):
            assert contents(loader) == [first[number % len(first)] for number in range(len(loader))]


def test_a_resumed_epoch_has_as_many_batches_as_are_left(make):
    loader, resumed = make(Numbers(50)), make(Numbers(50))
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    resumed.load_state_dict(loader.state_dict())
    assert contents(resumed) == contents(iterator)
    assert resumed.state_dict() == loader.state_dict()


def test_the_dataset_is_read_for_the_first_batches_only(make):
    class Counted(Numbers):
        reads = 0

        def __getitem__(self, index: int) -> int:
            self.reads += 1
            return index

    dataset = Counted(50)
    loader = make(dataset)
    assert dataset.reads == 0
    for _ in range(2):
        list(loader)
    assert dataset.reads == 2 * COUNT
    assert loader.stats() == {"cached": {"batches": COUNT}}


def test_the_warning_that_accuracy_means_nothing_is_logged_once(make, caplog):
    with caplog.at_level(logging.WARNING, logger="loaders"):
        loader = make(Numbers(50))
        for _ in range(2):
            list(loader)
    (said,) = caplog.messages
    assert "the same 8 batches again and again" in said
    assert "accuracy means nothing" in said


@pytest.mark.parametrize("shuffle", [True, False])
def test_only_training_is_cached_an_evaluation_has_every_sample(shuffle):
    config = LoaderConfig(name="cached", num_workers=0)
    with build_loader(config, Numbers(50), batch_size=2, seed=0, shuffle=shuffle) as loader:
        assert isinstance(loader.loader, CachedLoader) == shuffle
        assert not shuffle or loader.depth == 0, "its batches are prepared once"
        assert len(loader) == len(batches := contents(loader)) == 25
    assert len({row for batch in batches for row in batch}) == (2 * COUNT if shuffle else 50)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_transform_runs_once_for_each_batch_that_is_kept(device):
    calls = []

    def transform(batch, random):
        calls.append(random.key)
        return batch + 1000

    config = LoaderConfig(name="cached", num_workers=0, preload_depth=0)
    options = {"batch_size": 2, "seed": 0, "shuffle": True, "device": device, "transform": transform}
    with build_loader(config, Numbers(50), **options) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    assert {batch.device.type for batch in batches} == {device}
    assert contents(batches[:COUNT]) == [[row + 1000 for row in batch] for batch in epoch_of(0, 50)[:COUNT]]
    assert len(calls) == COUNT
