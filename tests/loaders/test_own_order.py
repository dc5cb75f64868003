"""Our order: what its state may be loaded into, how others may use it, and a dataset that changes its length."""

import copy
import logging
from itertools import chain, permutations

import pytest
from example_datasets import Numbers, contents, rows
from torch.utils.data import BatchSampler, DataLoader

from loaders import ResidentLoader, TorchLoader, WorkerLoader

LENGTH, BATCH_SIZE = 24, 4


def seeded(dataset=None, **settings) -> WorkerLoader:
    dataset = Numbers(LENGTH) if dataset is None else dataset
    return WorkerLoader(dataset, BATCH_SIZE, **{"seed": 0, "persistent_workers": True, **settings})


# The state knows what made the order


ORDERS = {
    "shuffled": {"shuffle": True},
    "sequential": {"shuffle": False},
    "sampler": {"sampler": range(LENGTH)},
    "'shuffled, last_batch=rollover'": {"shuffle": True, "last_batch": "rollover"},
}


@pytest.mark.parametrize("make", [WorkerLoader, TorchLoader, ResidentLoader])
@pytest.mark.parametrize(("ours", "theirs"), list(permutations(ORDERS, 2)))
def test_a_state_of_another_kind_of_order_is_refused_with_both_kinds(make, ours, theirs):
    with make(Numbers(LENGTH), BATCH_SIZE, seed=0, **ORDERS[theirs]) as loader:
        next(loader)
        state = loader.state_dict()
    with make(Numbers(LENGTH), BATCH_SIZE, seed=0, **ORDERS[ours]) as loader:
        with pytest.raises(ValueError, match=f"order='?{theirs}.*, but the loader has order='?{ours}"):
            loader.load_state_dict(state)
        assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": 1}, "version=1, but the loader has version="),
        ({"seed": None}, "seed=None, but the loader has seed=0"),
        *[({"samples": wrong}, "use a state that state_dict") for wrong in (LENGTH + 1, -1, None)],
        *[({"epoch": wrong}, "use a state that state_dict") for wrong in ("1", -1)],
    ],
)
def test_a_state_of_another_version_or_without_a_place_is_refused(wrong, message):
    with seeded() as loader:
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict({**loader.state_dict(), **wrong})
        assert len(rows(loader)) == LENGTH


def test_a_state_of_a_dataset_that_has_grown_meanwhile_is_taken():
    dataset = Numbers(4)
    with WorkerLoader(dataset, 2, seed=0) as loader:
        state = {**loader.state_dict(), "dataset_length": 8, "samples": 6}
        dataset.length = 8
        loader.load_state_dict(state)
        assert contents(loader) == [[6, 7]]


# Our own sampler elsewhere


def epochs_of_ours(count: int, **settings) -> list:
    with seeded(shuffle=True, num_workers=0, **settings) as loader:
        return [contents(loader) for _ in range(count)]


def test_our_samplers_move_on_by_themselves_in_a_stock_loader():
    for last_batch in ("keep", "rollover"):
        for given in ("sampler", "batch_sampler"):
            with seeded(shuffle=True, num_workers=2, last_batch=last_batch) as loader:
                size = {"batch_size": BATCH_SIZE} if given == "sampler" else {}
                stock = DataLoader(loader.dataset, **{given: getattr(loader, given)}, **size)
                assert [contents(stock) for _ in range(3)] == epochs_of_ours(3, last_batch=last_batch)


@pytest.mark.parametrize("last_batch", ["keep", "drop", "rollover"])
@pytest.mark.parametrize("pad", [True, False])
def test_our_samplers_have_the_length_of_the_epoch_that_they_run_next(last_batch, pad):
    for length in (0, 1, 21, 22):
        settings = {"shuffle": True, "last_batch": last_batch, "rank": 1, "world_size": 3, "pad": pad}
        loader = seeded(Numbers(length), **settings)
        for epoch in (0, 1, 2, 7):
            loader.sampler.set_epoch(epoch)
            assert len(loader.sampler) == sum(map(len, loader.batch_sampler))
            loader.batch_sampler.set_epoch(epoch)
            assert len(loader.batch_sampler) == len(list(loader.batch_sampler))


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


@pytest.mark.parametrize("make", [TorchLoader, ResidentLoader])
def test_a_loader_that_has_a_copy_of_the_dataset_refuses_another_length_with_both(make):
    samples = list(range(1234))
    with make(samples, 4) as loader:
        samples.pop()
        with pytest.raises(RuntimeError, match=r"list had 1,234 samples when this \w+ was made, and has 1,233 now"):
            iter(loader)


@pytest.mark.parametrize("name", ["batch_sampler", "sampler", "batch_sampler.sampler"])
def test_a_sampler_that_replaces_the_loaders_own_is_refused_because_it_would_not_be_read(name):
    with seeded(num_workers=1) as loader:
        *inner, last = name.split(".")
        owner = loader.batch_sampler if inner else loader
        object.__setattr__(owner, last, [[3], [2]])  # as loaders do that repeat their sampler for ever
        with pytest.raises(ValueError, match="pass the sampler as one, or leave out the seed"):
            iter(loader)


class OtherOrder(WorkerLoader):
    _index_sampler = ((3, 2),)


def test_an_index_sampler_that_a_subclass_defines_is_refused_because_it_would_not_be_read():
    assert contents(OtherOrder(Numbers(LENGTH))) == [[3, 2]]
    with OtherOrder(Numbers(LENGTH), seed=0) as loader, pytest.raises(ValueError, match="leave out the seed"):
        iter(loader)


def test_a_users_batch_sampler_may_get_another_sampler_between_epochs():
    batch_sampler = BatchSampler(range(4), 2, drop_last=False)
    with WorkerLoader(Numbers(LENGTH), batch_sampler=batch_sampler, seed=0) as loader:
        assert contents(loader) == [[0, 1], [2, 3]]
        batch_sampler.sampler = range(4, 6)
        for way in (lambda same: same, copy.copy, copy.deepcopy):
            assert contents(way(loader)) == [[4, 5]]
