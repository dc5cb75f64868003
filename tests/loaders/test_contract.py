"""What every loader promises, run over each of them. A new loader joins by a line in LOADERS."""

import json
import multiprocessing
import random
import traceback
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from example_datasets import Augmented, Faulty, Numbers, contents

from loaders import Preloader, ResidentLoader, TorchLoader, WorkerLoader
from loaders.cached_loader import CachedLoader
from loaders.order import Order


class Case(NamedTuple):
    """A loader under test: `make(dataset, batch_size, shuffle=..., seed=..., ...)` builds it."""

    name: str
    make: Callable[..., Any]
    seeds_plain_datasets: bool = True  # False where a thread reads them, which never touches the global generators
    draws_like: Callable[..., Any] = TorchLoader  # what gives a plain dataset's samples the same random numbers
    one_at_a_time: bool = True  # iter() ends the iterator before
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
    Case(
        "workers-1-independent",
        partial(WorkerLoader, num_workers=1, prefetch_factor=1),
        draws_like=WorkerLoader,
        one_at_a_time=False,
    ),
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
# Its batches are few and come again and again; their number, its state and its end are as any loader's.
REPEATING = Case("cached", cached)

# Five batches of four, the last of them with two samples.
LENGTH, BATCH_SIZE, BATCHES = 18, 4, 5


def builder(make: Callable[..., Any], made: list) -> Callable[..., Any]:
    def build(dataset: Any = None, batch_size: int = BATCH_SIZE, shuffle: bool = True, seed: int = 0, **settings):
        dataset = Numbers(LENGTH) if dataset is None else dataset
        made.append(make(dataset, batch_size, shuffle=shuffle, seed=seed, **settings))
        return made[-1]

    return build


@pytest.fixture(params=LOADERS, ids=lambda case: case.name)
def case(request) -> Case:
    return request.param


@pytest.fixture
def make(case):
    made: list = []
    yield builder(case.make, made)
    for loader in made:
        loader.close()


@pytest.fixture
def make_reading_by_batch(case, make):
    if case.reads_once:
        pytest.skip("the whole dataset is read at once here")
    return make


@pytest.fixture(params=[*LOADERS, REPEATING], ids=lambda case: case.name)
def make_any(request):
    """`make`, for what does not depend on which samples a batch has."""
    made: list = []
    yield builder(request.param.make, made)
    for loader in made:
        loader.close()


@pytest.fixture
def make_another(case):
    """The loader after this one in the list: so each hands over to each other, directly or through others."""
    made: list = []
    yield builder(LOADERS[(LOADERS.index(case) + 1) % len(LOADERS)].make, made)
    for loader in made:
        loader.close()


def epoch_of(number: int, shuffle: bool = True, **settings) -> list[list[int]]:
    """The batches that epoch `number` has in every loader."""
    order = Order(**{"length": LENGTH, "batch_size": BATCH_SIZE, "seed": 0, "shuffle": shuffle, **settings})
    return [order.indices(number, order.positions(batch)).tolist() for batch in range(len(order))]


def flat(lists) -> list:
    return list(chain.from_iterable(lists))


def take(iterator, count: int) -> list[list[int]]:
    return contents(next(iterator) for _ in range(count))


def outcomes(iterator) -> list:
    """What each call of next() gave until the epoch's end, errors among it."""
    seen: list = []
    while True:
        try:
            seen.append(next(iterator).tolist())
        except StopIteration:
            return seen
        except ValueError as error:
            seen.append("".join(traceback.format_exception(type(error), error, error.__traceback__)))


def place(loader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["samples"]


# Order


def test_epochs_differ_and_are_the_same_in_every_loader(make):
    loader = make()
    epochs = [contents(loader) for _ in range(3)]
    assert epochs == [epoch_of(0), epoch_of(1), epoch_of(2)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_another_seed_is_another_order(make):
    assert contents(make(seed=1)) == epoch_of(0, seed=1) != epoch_of(0)


def test_without_shuffling_the_order_is_the_datasets(make):
    loader = make(shuffle=False)
    for _ in range(2):
        assert contents(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17]]


def test_a_short_last_batch_is_dropped_where_that_is_asked_for(make):
    loader = make(last_batch="drop")
    assert len(loader) == BATCHES - 1
    assert contents(loader) == epoch_of(0)[:-1]
    assert contents(make(last_batch="drop", drop_last=True)) == epoch_of(0)[:-1]


def test_kept_batches_stay_as_they_were(make):
    loader = make()
    kept, copies = [], []
    for _ in range(2):
        for batch in loader:
            kept.append(batch)
            copies.append(batch.clone())
    loader.close()
    assert contents(kept) == contents(copies) == epoch_of(0) + epoch_of(1)


# Sharing among ranks: test_order.py shows that all ranks together have what one would have.


@pytest.mark.parametrize("settings", [{}, {"pad": False}, {"drop_last": True}])
def test_a_rank_has_the_rows_that_the_order_gives_it(make, settings):
    # Of ten samples in global batches of six, four are left for three ranks.
    settings = {"batch_size": 2, "rank": 1, "world_size": 3, **settings}
    assert contents(make(Numbers(10), **settings)) == epoch_of(0, length=10, **settings)


# Which epoch runs


def test_set_epoch_names_the_next_epoch_and_the_ones_after_follow(make):
    loader = make()
    loader.set_epoch(7)
    assert contents(loader) == epoch_of(7)
    assert contents(loader) == epoch_of(8)
    loader.set_epoch(7)
    assert contents(loader) == epoch_of(7)


def test_set_epoch_leaves_the_running_epoch_alone(make):
    loader = make()
    iterator = iter(loader)
    start = take(iterator, 2)
    loader.set_epoch(5)
    assert start + contents(iterator) == epoch_of(0)
    assert contents(loader) == epoch_of(5)


def test_an_invalid_epoch_number_is_refused(make_any):
    loader = make_any()
    for epoch in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="an epoch is an integer from 0"):
            loader.set_epoch(epoch)


def test_next_starts_an_epoch_if_none_is_running(make):
    loader = make()
    for number in range(2):
        assert take(loader, BATCHES) == epoch_of(number)
        with pytest.raises(StopIteration):
            next(loader)


def test_next_goes_on_with_the_running_epoch_whose_iterator_stays_at_its_end(make):
    loader = make()
    iterator = iter(loader)
    assert take(iterator, 1) + take(loader, 1) + contents(iterator) == epoch_of(0)
    assert contents(iterator) == []


def test_breaking_off_leaves_nothing_behind_in_the_next_epoch(make):
    loader = make()
    for number, taken in enumerate((1, 0, 3, BATCHES)):
        assert take(iter(loader), taken) == epoch_of(number)[:taken]
    assert contents(loader) == epoch_of(4)


def test_a_newer_iterator_ends_the_older(make, case):
    if not case.one_at_a_time:
        pytest.skip("its iterators are independent")
    loader = make()
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(RuntimeError, match=r"a newer iter\(\) or load_state_dict\(\) ended this epoch"):
        next(older)
    assert contents(newer) == epoch_of(1)


@pytest.mark.parametrize("settings", [{"dataset": Numbers(0)}, {"dataset": Numbers(3), "drop_last": True}])
def test_an_epoch_may_have_no_batches(make_any, settings):
    loader = make_any(**settings)
    assert len(loader) == 0
    for number in range(2):
        assert contents(loader) == []
        assert place(loader) == (number + 1, 0)


# State


def test_state_counts_what_the_consumer_received(make_any):
    loader = make_any()
    assert place(loader) == (0, 0)
    for number in range(2):
        iterator = iter(loader)
        places = [place(loader)]
        for _ in range(BATCHES):
            next(iterator)
            places.append(place(loader))
        # After the last batch, before the end is seen and after it, the place is the next epoch's beginning.
        assert places == [(number, 0), (number, 4), (number, 8), (number, 12), (number, 16), (number + 1, 0)]
        assert contents(iterator) == []
        assert place(loader) == (number + 1, 0)


def test_state_before_an_epoch_names_the_epoch_that_will_run(make_any):
    loader = make_any()
    loader.set_epoch(4)
    assert place(loader) == (4, 0)


@pytest.mark.parametrize("taken", [1, BATCHES])
def test_state_is_plain_json_and_outlives_close(make_any, taken):
    loader = make_any()
    take(iter(loader), taken)
    state = loader.state_dict()
    assert (state["seed"], state["dataset_length"], state["global_batch_size"]) == (0, LENGTH, BATCH_SIZE)
    loader.close()
    assert json.loads(json.dumps(loader.state_dict())) == state


def test_resuming_gives_exactly_the_remaining_batches(make):
    loader, resumed = make(), make()
    loader.set_epoch(2)
    iterator = iter(loader)
    for taken in range(BATCHES + 1):
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert resumed.state_dict() == loader.state_dict()
        if taken < BATCHES:
            assert contents(resumed) == epoch_of(2)[taken:]
            next(iterator)
    assert contents(resumed) == epoch_of(3)


def test_a_state_of_one_loader_resumes_in_any_other(make, make_another):
    loader, resumed = make(), make_another()
    take(iter(loader), 2)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict() == loader.state_dict()
    assert contents(resumed) == epoch_of(0)[2:]


def test_a_state_resumes_with_another_world_size(make):
    loader = make(batch_size=4)
    take(iter(loader), 2)
    rank = make(batch_size=2, rank=1, world_size=2)
    rank.load_state_dict(loader.state_dict())
    assert contents(rank) == epoch_of(0, batch_size=2, rank=1, world_size=2)[2:]


def test_a_state_can_be_loaded_in_the_middle_of_an_epoch(make, case):
    loader = make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    next(iterator)
    loader.load_state_dict(state)
    if case.one_at_a_time:
        with pytest.raises(RuntimeError, match="ended this epoch"):
            next(iterator)
    assert place(loader) == (0, 4)
    assert contents(loader) == epoch_of(0)[1:]


def test_next_starts_the_epoch_of_a_state_loaded_in_the_middle_of_another(make):
    loader = make()
    next(loader)
    state = loader.state_dict()
    next(loader)
    loader.load_state_dict(state)
    assert take(loader, BATCHES - 1) == epoch_of(0)[1:]


def test_set_epoch_keeps_the_place_in_the_same_epoch_and_drops_it_for_another(make):
    loader = make()
    loader.set_epoch(3)
    take(iter(loader), 2)
    state = loader.state_dict()
    for epoch, remaining in ((3, epoch_of(3)[2:]), (2, epoch_of(2)), (4, epoch_of(4))):
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        assert contents(loader) == remaining


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


# Rollover: what is left over of an epoch begins the next one's first batch.

# 18 samples in batches of five: the epochs begin with 0, 3, 1, 4 and 2 samples of the one before.
ROLLOVER: dict[str, Any] = {"batch_size": 5, "last_batch": "rollover"}
COUNTS = [3, 4, 3, 4, 4]


@cache
def rolled(*epochs: int, length: int = LENGTH, size: int = 5) -> list[list[int]]:
    """The batches of epochs under rollover: those of the endless concatenation that end in them."""
    stream = [
        (epoch, index)
        for epoch in range(max(epochs) + 1)
        for index in Order(length, 1, True, 0).indices(epoch, np.arange(length)).tolist()
    ]
    batches = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
    return [[index for _, index in batch] for batch in batches if batch[-1][0] in epochs]


def test_under_rollover_every_batch_is_full_and_every_sample_delivered(make):
    loader = make(**ROLLOVER)
    epochs = [contents(loader) for _ in COUNTS]
    assert epochs == [rolled(epoch) for epoch in range(5)]
    assert [len(batches) for batches in epochs] == COUNTS
    assert sorted(flat(flat(epochs))) == sorted(5 * list(range(LENGTH))), "five epochs end with a full batch"


def test_under_rollover_the_length_is_that_of_the_epoch_which_the_next_iter_runs(make_any):
    loader = make_any(**ROLLOVER)
    for number, count in enumerate(COUNTS):
        assert len(loader) == count
        iterator = iter(loader)
        assert len(iterator) == count
        assert place(loader) == (number, 0)
        assert len(list(iterator)) == count
    loader.set_epoch(2)
    assert len(loader) == COUNTS[2]


def test_under_rollover_an_epoch_is_the_same_whenever_it_runs(make):
    loader = make(**ROLLOVER)
    for epoch in (3, 1, 1, 20):
        loader.set_epoch(epoch)
        assert take(iter(loader), 2) == rolled(epoch)[:2]
    assert contents(loader) == rolled(21)


def test_under_rollover_resuming_gives_exactly_the_remaining_batches(make):
    loader, resumed = make(**ROLLOVER), make(**ROLLOVER)
    loader.set_epoch(1)  # of four batches
    iterator = iter(loader)
    for taken in range(5):
        assert place(loader) == ((2, 0) if taken == 4 else (1, 5 * taken))
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert resumed.state_dict() == loader.state_dict()
        assert len(resumed) == COUNTS[2 if taken == 4 else 1]
        if taken < 4:
            assert contents(resumed) == rolled(1)[taken:]
            next(iterator)
    assert contents(resumed) == rolled(2)


def test_under_rollover_a_state_resumes_with_another_world_size(make):
    loader = make(Numbers(20), batch_size=6, last_batch="rollover")
    loader.set_epoch(1)  # begins with two samples of epoch 0
    whole = partial(rolled, length=20, size=6)
    assert take(iter(loader), 1) == whole(1)[:1]
    rank = make(Numbers(20), batch_size=2, rank=1, world_size=3, last_batch="rollover")
    rank.load_state_dict(loader.state_dict())
    for batches in (whole(1)[1:], whole(2)):
        assert contents(rank) == [batch[2:4] for batch in batches]


def test_under_rollover_a_batch_may_need_several_epochs(make):
    loader = make(Numbers(2), **ROLLOVER)
    epochs = []
    for number in range(4):
        assert place(loader) == (number, 0)
        length = len(loader)
        epochs.append(contents(loader))
        assert len(epochs[-1]) == length
        assert place(loader) == (number + 1, 0)
    assert epochs == [rolled(epoch, length=2) for epoch in range(4)]
    assert [len(batches) for batches in epochs] == [0, 0, 1, 0]


def test_a_state_under_rollover_is_refused_without_it_in_words(make):
    loader, other = make(**ROLLOVER), make(batch_size=5)
    for given, taker in ((loader, other), (other, loader)):
        with pytest.raises(ValueError, match=r"'shuffled, last_batch=rollover'.*resume with the order of the state"):
            taker.load_state_dict(given.state_dict())


@pytest.mark.parametrize("last_batch", ["keep", "rollover"])
def test_two_words_for_the_last_batch_that_contradict_each_other_are_refused(make, last_batch):
    with pytest.raises(ValueError, match=f"last_batch='{last_batch}' and drop_last=True contradict"):
        make(last_batch=last_batch, drop_last=True)


def test_an_unknown_word_for_the_last_batch_is_refused(make):
    with pytest.raises(ValueError, match="last_batch=rolover: did you mean rollover"):
        make(last_batch="rolover")


# Errors


def test_errors_come_out_of_next_in_order_with_the_place_where_they_arose(make_reading_by_batch):
    loader = make_reading_by_batch(Faulty(LENGTH, 5, 13), shuffle=False)
    first, bad, third, worse, last = outcomes(iter(loader))
    assert (first, third, last) == ([0, 1, 2, 3], [8, 9, 10, 11], [16, 17])
    for text, sample in ((bad, 5), (worse, 13)):
        assert f"sample {sample} is bad" in text
        assert "in __getitem__" in text


def test_an_epoch_after_errors_is_as_any_other(make_reading_by_batch):
    loader = make_reading_by_batch(Faulty(LENGTH, 5))
    for number in range(2):
        seen = outcomes(iter(loader))
        assert [batch for batch in epoch_of(number) if 5 not in batch] == [s for s in seen if isinstance(s, list)]


def test_a_batch_that_raised_counts_in_the_state(make_reading_by_batch):
    loader = make_reading_by_batch(Faulty(LENGTH, 0), shuffle=False)
    iterator = iter(loader)
    with pytest.raises(ValueError, match="sample 0 is bad"):
        next(iterator)
    assert take(iterator, 1) == [[4, 5, 6, 7]]
    resumed = make_reading_by_batch(shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    assert take(resumed, 1) == [[8, 9, 10, 11]]
    assert contents(iterator) == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17]]
    assert place(loader) == (1, 0)


# Closing


def fresh(loader) -> None:
    pass


def running(loader) -> None:
    next(iter(loader))


def finished(loader) -> None:
    contents(loader)


def loaded(loader) -> None:
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())


def closed(loader) -> None:
    next(iter(loader))
    loader.close()


@pytest.mark.parametrize("bring", [fresh, running, finished, loaded, closed])
def test_close_may_be_called_in_any_state_and_iterating_afterwards_raises(make_any, bring):
    loader = make_any()
    bring(loader)
    loader.close()
    loader.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is closed"):
            iter(loader)
        with pytest.raises(RuntimeError, match="is closed"):
            next(loader)


def test_an_iterator_of_a_closed_loader_raises(make_any):
    loader = make_any()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(RuntimeError, match="close"):
        next(iterator)


def test_leaving_a_with_statement_closes(make_any):
    with make_any() as loader:
        assert len(contents(loader)) == BATCHES
    with pytest.raises(RuntimeError, match="is closed"):
        iter(loader)


def test_an_error_in_a_with_statement_closes_the_loader_and_propagates(make_any):
    with pytest.raises(KeyError, match="mine"), make_any() as loader:
        next(loader)
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="is closed"):
        iter(loader)


def test_close_ends_the_workers(make_any):
    loader = make_any()
    next(iter(loader))
    loader.close()
    assert multiprocessing.active_children() == []


def test_close_ends_the_workers_though_an_error_of_theirs_is_kept(make_reading_by_batch):
    # The error's traceback refers to the frames that it came through, and so to what they worked with.
    loader = make_reading_by_batch(Faulty(LENGTH, 0), shuffle=False)
    with pytest.raises(ValueError, match="sample 0 is bad") as kept:
        next(loader)
    loader.close()
    assert multiprocessing.active_children() == []
    assert kept.value.__traceback__ is not None


# Randomness


def global_states() -> tuple:
    name, words, *rest = np.random.get_state()
    return random.getstate(), (name, words.tolist(), *rest), torch.get_rng_state().tolist()


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


def test_random_numbers_differ_between_samples_batches_and_epochs(make_reading_by_batch, case):
    if not case.seeds_plain_datasets:
        pytest.skip("a thread reads the dataset here, with whatever state the global generators have")
    loader = make_reading_by_batch(Augmented(LENGTH))
    draws = torch.cat([torch.stack(batch[1:]) for _ in range(2) for batch in loader], dim=1)
    assert draws.shape == (3, 2 * LENGTH)
    assert all(len(set(generator.tolist())) == 2 * LENGTH for generator in draws)


# What else loop code asks for


def test_the_length_is_a_ranks_number_of_batches(make_any):
    loader = make_any(world_size=4)
    assert len(loader) == len(contents(loader))


def test_dataset_and_samplers_are_within_reach(make):
    dataset = Numbers(LENGTH)
    loader = make(dataset)
    assert loader.dataset is dataset
    assert len(loader.batch_sampler) == len(loader)
    assert [list(batch) for batch in loader.batch_sampler] == epoch_of(0)
    assert sorted(np.concatenate([np.atleast_1d(part) for part in loader.sampler])) == list(range(LENGTH))


def test_stats_are_plain_figures(make_any):
    loader = make_any()
    contents(loader)
    assert isinstance(loader.stats(), dict)
    json.dumps(loader.stats())
