"""What every loader promises, run over each of them. A new loader joins by a line in LOADERS."""

import copy
import multiprocessing
import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from example_datasets import Augmented, Faulty, Numbers, contents, global_states

from loaders import Preloader, ResidentLoader, TorchLoader, WorkerLoader
from loaders.cached_loader import CachedLoader
from loaders.order import Order


class Case(NamedTuple):
    """A loader under test: `make(dataset, batch_size, shuffle=..., seed=..., ...)` builds it."""

    name: str
    make: Callable[..., Any]
    seeds_plain_datasets: bool = True  # False where a thread reads them, which never touches the global generators
    draws_like: Callable[..., Any] = TorchLoader  # what gives a plain dataset's samples the same random numbers
    reads_once: bool = False  # the whole dataset at the first iter(): so its errors and its random numbers


def preloader(depth: int) -> Callable[..., Preloader]:
    def make(dataset, batch_size, **settings) -> Preloader:
        return Preloader(TorchLoader(dataset, batch_size, **settings), "cpu", depth)

    return make


def over_workers(depth: int) -> Callable[..., Preloader]:
    def make(dataset, batch_size, **settings) -> Preloader:
        loader = WorkerLoader(dataset, batch_size, num_workers=1, persistent_workers=True, **settings)
        return Preloader(loader, "cpu", depth)

    return make


def cached(dataset, batch_size, **settings) -> CachedLoader:
    return CachedLoader(TorchLoader(dataset, batch_size, **settings), batch_size, **settings)


LOADERS = [
    Case("torch", TorchLoader),
    Case("torch-1-worker", partial(TorchLoader, num_workers=1)),
    Case("preloader-depth-0", preloader(depth=0)),
    Case("preloader-depth-1", preloader(depth=1), seeds_plain_datasets=False),
    Case("workers-0", partial(WorkerLoader, persistent_workers=True), draws_like=WorkerLoader),
    Case("workers-2", partial(WorkerLoader, num_workers=2, persistent_workers=True), draws_like=WorkerLoader),
    Case("workers-1-independent", partial(WorkerLoader, num_workers=1, prefetch_factor=1), draws_like=WorkerLoader),
    Case("preloader-over-1-worker", over_workers(depth=2), draws_like=WorkerLoader),
    Case(
        "threads-2",
        partial(WorkerLoader, num_workers=2, persistent_workers=True, worker_method="thread"),
        seeds_plain_datasets=False,
    ),
    Case("resident", ResidentLoader, reads_once=True),
    Case(
        "preloader-over-resident",
        lambda *args, **settings: Preloader(ResidentLoader(*args, **settings), "cpu", depth=2),
        reads_once=True,
    ),
]
# Five batches of four, the last of them with two samples.
LENGTH, BATCH_SIZE, BATCHES = 18, 4, 5


@pytest.fixture(params=LOADERS, ids=lambda case: case.name)
def case(request) -> Case:
    return request.param


@pytest.fixture
def make(case, closed_later):
    def make(dataset: Any = None, batch_size: int = BATCH_SIZE, shuffle: bool = True, seed: int = 0, **settings):
        dataset = Numbers(LENGTH) if dataset is None else dataset
        return closed_later(case.make(dataset, batch_size, shuffle=shuffle, seed=seed, **settings))

    return make


@pytest.fixture
def make_reading_by_batch(case, make):
    if case.reads_once:
        pytest.skip("the whole dataset is read at once here")
    return make


def epoch_of(number: int, shuffle: bool = True, **settings) -> list[list[int]]:
    """The batches that epoch `number` has in every loader."""
    order = Order(**{"length": LENGTH, "batch_size": BATCH_SIZE, "seed": 0, "shuffle": shuffle, **settings})
    return [order.indices(number, order.positions(batch)).tolist() for batch in range(len(order))]


def take(iterator, count: int) -> list[list[int]]:
    return contents(next(iterator) for _ in range(count))


# Which epoch runs


def test_an_invalid_epoch_number_is_refused(make):
    loader = make()
    for epoch in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="an epoch is an integer from 0"):
            loader.set_epoch(epoch)


def test_next_starts_an_epoch_if_none_is_running(make):
    loader = make()
    for number in range(2):
        assert take(loader, BATCHES) == epoch_of(number)
        with pytest.raises(StopIteration):
            next(loader)
    state = loader.state_dict()
    next(loader)
    loader.load_state_dict(state)
    assert take(loader, BATCHES) == epoch_of(2)


# State


def test_a_state_of_other_data_is_refused_in_words_and_changes_nothing(make):
    loader = make()
    take(iter(loader), 1)
    before = loader.state_dict()
    for settings, theirs, ours in (
        ({"seed": 7}, "seed=7", "seed=0"),
        ({"dataset": Numbers(99)}, "dataset_length=99", "dataset_length=18"),
        ({"batch_size": 9}, "global_batch_size=9", "global_batch_size=4"),
        ({"world_size": 2}, "global_batch_size=8", "global_batch_size=4"),
    ):
        with pytest.raises(ValueError) as refusal:
            loader.load_state_dict(make(**settings).state_dict())
        assert theirs in str(refusal.value)
        assert ours in str(refusal.value)
        assert loader.state_dict() == before
    loader.load_state_dict(before)
    assert contents(loader) == epoch_of(0)[1:]


# The words for the last batch


@pytest.mark.parametrize("last_batch", ["keep", "rollover"])
def test_two_words_for_the_last_batch_that_contradict_each_other_are_refused(make, last_batch):
    with pytest.raises(ValueError, match=f"last_batch='{last_batch}' and drop_last=True contradict"):
        make(last_batch=last_batch, drop_last=True)
    with pytest.raises(ValueError, match="last_batch=rolover: did you mean rollover"):
        make(last_batch="rolover")


# Copies


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_running_loader_has_its_position_and_runs_epochs_of_its_own(make, duplicate):
    loader = make()
    if isinstance(loader, Preloader) and duplicate is copy.copy:
        pytest.skip("it would share the loader inside")
    iterator = iter(loader)
    assert take(iterator, 1) == epoch_of(0)[:1]
    with duplicate(loader) as other:
        state = loader.state_dict()
        assert other.state_dict() == state
        assert contents(other) == epoch_of(1)
        assert loader.state_dict() == state
        assert contents(iterator) == epoch_of(0)[1:]


# Closing


def test_an_error_in_a_with_statement_closes_the_loader_and_propagates(make):
    with pytest.raises(KeyError, match="mine"), make() as loader:
        next(loader)
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="is closed"):
        iter(loader)


def test_close_ends_the_workers_though_an_error_of_theirs_is_kept(make_reading_by_batch):
    # The error's traceback refers to the frames that it came through, and so to what they worked with.
    loader = make_reading_by_batch(Faulty(LENGTH, 0), shuffle=False)
    with pytest.raises(ValueError, match="sample 0 is bad") as kept:
        next(loader)
    loader.close()
    assert multiprocessing.active_children() == []
    assert kept.value.__traceback__ is not None


# Randomness


def test_loading_leaves_the_global_generators_alone(make, case):
    before = global_states()
    loader = make(Augmented(LENGTH) if case.seeds_plain_datasets else None)
    list(loader)
    next(loader)
    loader.close()
    assert global_states() == before


def test_a_plain_datasets_random_numbers_depend_on_nothing_but_seed_epoch_and_place(make_reading_by_batch, case):
    if not case.seeds_plain_datasets:
        pytest.skip("a thread reads the dataset here: exact for datasets that draw from the `random` they are given")
    expected = case.draws_like(Augmented(LENGTH), BATCH_SIZE, shuffle=True, seed=0)
    epochs = [[torch.stack(batch).tolist() for batch in expected] for _ in range(2)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    loader = make_reading_by_batch(Augmented(LENGTH))
    assert [torch.stack(batch).tolist() for batch in loader] == epochs[0]
    take_two = iter(loader)
    next(take_two), next(take_two)
    resumed = make_reading_by_batch(Augmented(LENGTH))
    resumed.load_state_dict(loader.state_dict())
    assert [torch.stack(batch).tolist() for batch in resumed] == epochs[1][2:]
    draws = [draw for epoch in epochs for batch in epoch for row in batch[1:] for draw in row]
    assert len(set(draws)) == 3 * 2 * LENGTH


# What else loop code asks for


def test_dataset_and_samplers_are_within_reach(make):
    dataset = Numbers(LENGTH)
    loader = make(dataset)
    assert loader.dataset is dataset
    assert len(loader.batch_sampler) == len(loader)
    assert [list(batch) for batch in loader.batch_sampler] == epoch_of(0)
    assert sorted(np.concatenate([np.atleast_1d(part) for part in loader.sampler])) == list(range(LENGTH))
