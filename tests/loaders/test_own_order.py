"""Our order: what its state may be loaded into, how others may use it, and a dataset that changes its length."""

import logging
from itertools import chain

import pytest
from example_datasets import Numbers, contents
from torch.utils.data import DataLoader

from loaders import ResidentLoader, TorchLoader, WorkerLoader

LENGTH, BATCH_SIZE = 24, 4


def seeded(dataset=None, **settings) -> WorkerLoader:
    dataset = Numbers(LENGTH) if dataset is None else dataset
    return WorkerLoader(dataset, BATCH_SIZE, **{"seed": 0, "persistent_workers": True, **settings})


def rows(loader) -> list:
    """One epoch's samples in their order."""
    return list(chain.from_iterable(contents(loader)))


# The state knows what made the order


ORDERS = {
    "shuffled": {"shuffle": True},
    "in the dataset's order": {"shuffle": False},
    "given": {"sampler": range(LENGTH)},
}


def refusal(make, ours: dict, theirs: dict) -> str:
    """What is said where a loader takes up a state of another one."""
    with make(Numbers(LENGTH), BATCH_SIZE, seed=0, **theirs) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    with make(Numbers(LENGTH), BATCH_SIZE, seed=0, **ours) as loader:
        with pytest.raises(ValueError) as refused:
            loader.load_state_dict(state)
        assert loader.state_dict()["epoch"] == loader.state_dict()["samples"] == 0
    return str(refused.value)


@pytest.mark.parametrize("make", [WorkerLoader, TorchLoader, ResidentLoader])
def test_a_shuffled_loader_and_one_that_does_not_shuffle_refuse_each_others_state(make):
    one = refusal(make, ORDERS["shuffled"], ORDERS["in the dataset's order"])
    other = refusal(make, ORDERS["in the dataset's order"], ORDERS["shuffled"])
    assert "shuffle" in one and "shuffle" in other
    assert one != other, "both values are named, the state's and the loader's"


@pytest.mark.parametrize("own", ["shuffled", "in the dataset's order"])
def test_a_loader_over_a_given_sampler_and_one_with_our_order_refuse_each_others_state(own):
    one = refusal(WorkerLoader, ORDERS[own], ORDERS["given"])
    other = refusal(WorkerLoader, ORDERS["given"], ORDERS[own])
    assert "sampler" in one and "sampler" in other
    assert one != other, "both are named, the state's and the loader's"


# Our own sampler elsewhere


def epochs_of_ours(count: int, **settings) -> list:
    with seeded(shuffle=True, num_workers=0, **settings) as loader:
        return [contents(loader) for _ in range(count)]


def test_our_batch_sampler_moves_on_by_itself_in_a_stock_loader():
    with seeded(shuffle=True, num_workers=2) as loader:
        stock = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
        assert [contents(stock) for _ in range(3)] == epochs_of_ours(3)


def test_our_sampler_moves_on_by_itself_in_a_stock_loader():
    with seeded(shuffle=True, num_workers=2) as loader:
        stock = DataLoader(loader.dataset, BATCH_SIZE, sampler=loader.sampler)
        assert [contents(stock) for _ in range(3)] == epochs_of_ours(3)


@pytest.mark.parametrize("which", ["sampler", "batch_sampler"])
def test_our_samplers_can_be_told_the_epoch(which):
    epochs = [list(chain.from_iterable(epoch)) for epoch in epochs_of_ours(6)]
    with seeded(shuffle=True, num_workers=0) as loader:
        sampler = getattr(loader, which)

        def order() -> list[int]:
            return list(chain.from_iterable(sampler)) if which == "batch_sampler" else list(map(int, sampler))

        sampler.set_epoch(3)
        assert [order(), order()] == [epochs[3], epochs[4]]
        sampler.set_epoch(1)
        assert [order(), order()] == [epochs[1], epochs[2]]


@pytest.mark.parametrize("which", ["sampler", "batch_sampler"])
def test_iterating_our_samplers_does_not_disturb_the_loader(which, reader):
    expected = epochs_of_ours(3)
    with seeded(shuffle=True, **reader) as loader:
        list(getattr(loader, which))
        list(getattr(loader, which))
        assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (0, 0)
        assert contents(loader) == expected[0]
        iterator = iter(loader)
        start = [next(iterator).tolist()]
        list(getattr(loader, which))
        assert start + contents(iterator) == expected[1]
        assert contents(loader) == expected[2]


# Datasets that change their length


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("new", [37, 10])
def test_a_dataset_that_changes_its_length_is_followed_at_the_next_epoch(new, persistent, reader, caplog):
    samples = list(range(LENGTH))
    caplog.set_level(logging.INFO, logger="loaders")
    with seeded(samples, shuffle=True, **{**reader, "persistent_workers": persistent}) as loader:
        assert sorted(rows(loader)) == samples
        samples[:] = range(100, 100 + new)
        assert not any(str(new) in message for message in caplog.messages)
        epoch = rows(loader)
        assert any(str(LENGTH) in message and str(new) in message for message in caplog.messages)
        assert len(loader) == -(-new // BATCH_SIZE)
        assert loader.state_dict()["dataset_length"] == new
    with seeded(samples, shuffle=True, num_workers=0) as fresh:
        fresh.set_epoch(1)
        assert rows(fresh) == epoch
    assert sorted(epoch) == samples
