"""What WorkerLoader promises beyond the contract of all loaders (test_contract.py)."""

import threading
from itertools import chain

import numpy as np
import pytest
import torch
from example_datasets import Noisy, Numbers, Written, contents
from torch.utils.data import WeightedRandomSampler, get_worker_info

from loaders import WorkerLoader
from loaders.randomness import fold


def as_list(samples: list) -> list:
    return samples


def epochs(loader, count: int = 2) -> list:
    with loader:
        return [contents(loader) for _ in range(count)]


def seeded(dataset, num_workers: int, **settings) -> WorkerLoader:
    settings = {"batch_size": 3, "shuffle": True, "seed": 7, "persistent_workers": True, **settings}
    return WorkerLoader(dataset, num_workers=num_workers, **settings)


# The same bytes


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Noisy, {"num_workers": 1}),
        (Written, {"num_workers": 1}),
        (Noisy, {"num_workers": 2, "prefetch_factor": 5}),
        (Written, {"num_workers": 3, "persistent_workers": False}),
        (Noisy, {"num_workers": 2, "prefetch_batches": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_are_equal_whatever_reads_them(kind, settings):
    assert epochs(seeded(kind(20), **settings)) == epochs(seeded(kind(20), 0))


def test_ranks_share_a_global_batch_with_the_random_numbers_of_a_single_rank():
    whole = [batch["noise"] for batch in seeded(Written(24), 0, batch_size=6)]
    shares = [seeded(Written(24), 0, rank=rank, world_size=2) for rank in (0, 1)]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert torch.equal(batch, torch.cat([part["noise"] for part in parts]))


def test_the_repeats_of_a_weighted_sampler_differ_and_can_be_had_again():
    def noise() -> list:
        sampler = WeightedRandomSampler([1.0, 1.0], 12)
        return [row for batch in seeded(Noisy(2), 2, shuffle=None, sampler=sampler) for row in batch["noise"].tolist()]

    torch.manual_seed(1)
    first = noise()
    torch.manual_seed(2)
    assert noise() == first
    assert len({tuple(row) for row in first}) == 12


@pytest.mark.parametrize("kind", [Noisy, Written])
def test_a_sample_that_is_carried_over_draws_what_it_would_have_drawn_in_its_own_epoch(kind, reader):
    if kind is Noisy and reader.get("worker_method") == "thread":
        pytest.skip("threads leave the global generators alone")

    def samples(**settings) -> list:
        batches = chain(
            *epochs(WorkerLoader(kind(18), 5, shuffle=True, seed=3, persistent_workers=True, **settings), 5)
        )
        return [row for batch in batches for row in zip(batch["index"], batch["noise"], strict=True)]

    assert samples(last_batch="rollover", **reader) == samples(last_batch="keep")


class Started(Numbers):
    """Counts the samples that worker threads have begun to read beyond those that the consumer has asked for."""

    def __init__(self) -> None:
        super().__init__(60)
        self.begun, self.asked_for, self.most = 0, 0, 0
        self.progress = threading.Condition()

    def __getitem__(self, index: int) -> int:
        with self.progress:
            self.begun += 1
            self.most = max(self.most, self.begun - self.asked_for)
            self.progress.notify_all()
        return index


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        ({}, 4),
        ({"prefetch_factor": 4}, 8),
        ({"prefetch_factor": 0}, 1),
        ({"prefetch_batches": 5}, 5),
        ({"num_workers": 0}, 0),
    ],
)
@pytest.mark.parametrize("seed", [None, 0])
def test_as_many_batches_are_loaded_ahead_as_was_asked_for(settings, depth, seed, bound):
    dataset = Started()
    settings = {"num_workers": 2, "worker_method": "thread", **settings}
    with WorkerLoader(dataset, 1, seed=seed, **settings) as loader:
        iterator = iter(loader)
        for ahead in [depth] + [depth - 1] * 20:  # a task may wait until the consumer has dropped its batch
            with dataset.progress:
                assert dataset.progress.wait_for(lambda at=dataset.asked_for + ahead: dataset.begun >= at, bound)
                dataset.asked_for += 1
            next(iterator)
    assert dataset.most == depth


class Seeds(Numbers):
    def __getitem__(self, index: int) -> int:
        return get_worker_info().seed


def test_workers_start_with_a_seed_that_depends_on_the_loaders_and_its_rank():
    for seed, rank in ((0, 0), (5, 0), (5, 1)):
        with WorkerLoader(Seeds(4), 2, num_workers=1, seed=seed, rank=rank, world_size=2) as loader:
            assert [set(batch.tolist()) for batch in loader] == [{int(fold(seed, rank) >> np.uint64(2))}]


@pytest.mark.parametrize("last_batch", ["keep", "rollover"])
def test_without_batching_each_sample_is_a_batch(last_batch, reader):
    with WorkerLoader(Numbers(3), None, seed=0, last_batch=last_batch, **reader) as loader:
        assert len(loader) == 3
        assert [list(loader) for _ in range(2)] == [[0, 1, 2]] * 2


# Slots


@pytest.mark.parametrize(("kind", "overflowed"), [(Written, [0]), (Noisy, [1, 2, 3, 4])])
def test_in_the_steady_state_nothing_is_pickled_or_copied_and_only_a_plain_datasets_first_batches_find_no_slot(
    kind, overflowed
):
    with seeded(kind(300), 2) as loader:
        for _ in range(3):
            for _ in loader:
                pass
        stats = loader.stats()["workers"]
    assert stats["batches"] == 300
    assert stats["overflowed_batches"] in overflowed
    assert stats["pickled_batches"] == stats["copied_batches"] == 0


@pytest.mark.parametrize(("held", "copies"), [(7, False), (13, True)])
def test_who_holds_more_than_eight_batches_gets_the_next_ones_as_copies(held, copies):
    kept: list = []
    with seeded(Written(300), 2, shuffle=False) as loader:
        for batch in loader:
            kept = [*kept, batch][-held:]
        assert (loader.stats()["workers"]["copied_batches"] > 0) == copies
    assert [batch["index"][0].item() for batch in kept] == list(range(300 - 3 * held, 300, 3))


# Epochs


def test_iterators_without_persistent_workers_are_independent():
    with seeded(Written(20), 1, persistent_workers=False) as loader:
        one, other = iter(loader), iter(loader)
        interleaved = [tuple(contents(pair)) for pair in zip(one, other, strict=True)]
    first, second = epochs(seeded(Written(20), 0))
    assert interleaved == list(zip(first, second, strict=True))


class SlowLast(Numbers):
    def __getitem__(self, index: int) -> int:
        threading.Event().wait(0.2 * (index == 11))
        return index


def test_out_of_order_an_epoch_still_has_its_own_batches_only():
    with seeded(SlowLast(12), 2, batch_size=2, shuffle=False, in_order=False) as loader:
        for _ in range(3):
            batches = [batch.tolist() for batch in loader]
            assert sorted(batches) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


# What else a loader does


def test_an_order_that_cannot_be_resumed_has_no_state_and_the_error_says_why():
    with pytest.raises(AttributeError, match="needs a loader with a seed"):
        WorkerLoader(Noisy(20)).state_dict()
    with pytest.raises(ValueError, match="in_order=False"):
        seeded(Noisy(20), 2, in_order=False).state_dict()


class Tenfold(WorkerLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 10


def test_next_goes_through_the_iter_of_a_subclass(reader):
    with Tenfold(Numbers(8), 4, seed=0, **reader) as loader:
        for _ in range(2):
            assert [next(loader).tolist() for _ in range(2)] == [[0, 10, 20, 30], [40, 50, 60, 70]]
            with pytest.raises(StopIteration):
                next(loader)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_figures_of_an_epoch_can_be_read_after_it_although_its_workers_have_gone(seed, num_workers):
    with WorkerLoader(Numbers(6), 2, seed=seed, num_workers=num_workers) as loader:
        for _ in range(2):
            list(loader)
            assert loader.stats()["workers"]["batches"] == 3
    assert loader.stats() == {}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_collate_fn_that_is_set_between_epochs_without_workers_counts_from_the_next_epoch_on(persistent):
    with WorkerLoader(Numbers(4), 2, seed=0, persistent_workers=persistent) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        loader.collate_fn = as_list
        assert list(loader) == [[0, 1], [2, 3]]
