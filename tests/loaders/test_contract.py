"""What every loader promises (loaders/CONTRACT.md), run over each of them (every_loader.py).

A case says where a promise does not apply.
"""

import inspect
import random
from itertools import islice

import numpy as np
import pytest
import torch
from every_loader import BATCH_SIZE, LENGTH, LOADERS, ORDERS, Streamed, make, ordered, saved
from example_datasets import Noisy, Numbers, Written, contents, global_states, plain
from torch.utils.data import DataLoader

from loaders import ResidentLoader, SeededLoader, StreamLoader, TorchLoader, WorkerLoader


def take(iterator, count):
    return contents(islice(iterator, count))


# Epochs


def test_iter_runs_the_epoch_that_set_epoch_named_and_else_the_next_one(case, build):
    loader = build()
    for epoch in (0, 1):
        assert contents(loader) == case.batches(epoch)
    loader.set_epoch(np.int64(5))
    assert contents(loader) == case.batches(5)
    for epoch in (6, 7):  # loops that break off
        assert take(iter(loader), epoch - 5) == case.batches(epoch)[: epoch - 5]
    running = iter(loader)
    assert take(running, 1) == case.batches(8)[:1]
    loader.set_epoch(3)  # of the next one: this one goes on
    assert contents(running) == case.batches(8)[1:]
    assert contents(loader) == case.batches(3)
    for wrong in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="an epoch is an integer from 0"):
            loader.set_epoch(wrong)
    assert contents(loader) == case.batches(4)


def test_a_newer_iterator_ends_the_older_one_unless_they_are_independent(case, build):
    loader = build()
    older = iter(loader)
    newer = iter(loader)
    if case.is_independent:
        assert [take(older, 2), take(newer, 2)] == [case.batches(0)[:2], case.batches(1)[:2]]
    else:
        with pytest.raises(RuntimeError, match="ended this epoch"):
            next(older)
        assert contents(newer) == case.batches(0)  # nothing was taken of the older one


def test_an_epoch_of_which_nothing_was_taken_is_not_spent(case, build):
    loader = build()
    iter(loader)
    iterator = iter(loader)
    assert take(iterator, 2) == case.batches(0)[:2]
    state = saved(loader)
    del iterator
    loader.load_state_dict(state)
    for _ in range(2):
        iter(loader)
        assert saved(loader) == state
    assert contents(loader) == case.batches(0)[2:]
    assert contents(loader) == case.batches(1)


def test_next_starts_an_epoch_if_none_is_running(case, build):
    loader = build()
    for epoch in range(2):
        assert [plain(next(loader)) for _ in case.batches(epoch)] == case.batches(epoch)
        with pytest.raises(StopIteration):
            next(loader)
    state = saved(loader)
    begun = iter(loader)
    assert [plain(next(source)) for source in (begun, loader, begun)] == case.batches(2)[:3]
    loader.load_state_dict(state)
    assert plain(next(loader)) == case.batches(2)[0]


@pytest.mark.parametrize("settings", [{"drop_last": True}, {"last_batch": "keep"}])  # "drop": test_build.py
def test_the_last_batch_is_kept_or_dropped_and_the_length_says_so(case, build, settings):
    expected = case.batches(0, drop_last="drop_last" in settings)
    loader = build(**settings)
    assert contents(loader) == expected
    if not case.is_stream:
        assert len(loader) == len(iter(loader)) == len(expected)


def test_ranks_share_each_global_batch(name, case):
    if case.is_stream:
        pytest.skip("ranks share the streams: test_streams.py")
    for rank in (0, 1):
        settings = {"batch_size": 2, "rank": rank, "world_size": 2, "pad": rank == 0}
        with make(name, **settings) as loader:
            assert contents(loader) == ordered(0, **settings)


def test_a_dataset_that_has_changed_its_length_is_followed_at_the_next_iter(case, build):
    if case.is_stream:
        pytest.skip("a stream has no length")
    dataset = list(range(LENGTH))
    loader = build(dataset)
    list(loader)
    dataset.append(LENGTH)
    assert contents(loader) == case.batches(1, length=LENGTH + 1)
    assert len(loader) == 5


# State


def test_any_batch_can_be_resumed_at(case, build):
    loader = build()
    states = []
    loader.set_epoch(np.int64(1))
    states.append(saved(loader))
    for _ in loader:
        states.append(saved(loader))
        assert loader.at_epoch_end == (states[-1]["samples"] == 0)
    assert [state["epoch"] for state in states] == [1] * len(case.batches(1)) + [2]
    resumed = build()
    for number, state in enumerate(states[:-1]):
        resumed.load_state_dict(state)
        assert saved(resumed) == state and resumed.at_epoch_end == (state["samples"] == 0)
        if not case.is_stream:
            assert state["samples"] == number * BATCH_SIZE
        assert contents(resumed) == case.batches(1)[number:]
    resumed.load_state_dict(states[-1])
    assert contents(resumed) == case.batches(2)
    resumed.load_state_dict(states[1])
    resumed.set_epoch(1)  # as a loop over epochs does: it does not undo the resume
    assert contents(resumed) == case.batches(1)[1:]


@pytest.mark.parametrize("order", ORDERS)
def test_any_epoch_can_be_resumed_in_whatever_makes_the_order(name, case, order):
    if case.is_stream:
        pytest.skip("a stream has no sampler")
    settings, batches = ORDERS[order]
    with make(name, shuffle=None, **settings()) as loader, make(name, shuffle=None, **settings()) as resumed:
        assert [contents(loader) for _ in range(3)] == [batches(epoch) for epoch in range(3)]
        loader.set_epoch(1)
        next(loader)
        resumed.load_state_dict(saved(loader))
        assert contents(resumed) == batches(1)[1:]


def test_a_state_goes_on_in_any_other_loader(name, case, build):
    loader = build()
    take(iter(loader), 2)
    state = saved(loader)
    for other, theirs in LOADERS.items():
        if theirs.is_stream == case.is_stream and other in ("inline", "processes", "streams", "streams_inline"):
            with make(other) as resumed:
                resumed.load_state_dict(state)
                assert contents(resumed) == case.batches(0)[2:]
    if not case.is_stream:
        half = {"batch_size": BATCH_SIZE // 2, "rank": 1, "world_size": 2}
        with make(name, **half) as resumed:
            resumed.load_state_dict(state)
            assert contents(resumed) == ordered(0, **half)[2:]


def test_a_state_of_another_order_is_refused_with_both_values_and_changes_nothing(name, case, build):
    loader = build()
    take(iter(loader), 1)
    before = saved(loader)
    wrong = [({**before, "seed": 7}, "seed=7", "seed=0"), ({**before, "version": 0}, "version=0", "version=")]
    wrong += [(None, "None", "state_dict()"), ([before], "[{", "state_dict()")]
    wrong += [({"model": 1}, "model", "state_dict()")]
    other = make("inline" if case.is_stream else "streams")
    with other:  # by its order, from which its other entries follow
        wrong.append((saved(other), "order=", "order="))
    if not case.is_stream:
        wrong += [
            ({**before, "dataset_length": 99}, "dataset_length=99", f"dataset_length={LENGTH}"),
            ({**before, "global_batch_size": 9}, "global_batch_size=9", f"global_batch_size={BATCH_SIZE}"),
        ]
        with make(name, shuffle=False) as sequential:
            wrong.append((saved(sequential), "order='sequential'", "order='shuffled'"))
    for state, theirs, ours in wrong:
        with pytest.raises(ValueError) as refusal:
            loader.load_state_dict(state)
        assert theirs in str(refusal.value) and ours in str(refusal.value)
        assert saved(loader) == before
    loader.load_state_dict(before)
    assert contents(loader) == case.batches(0)[1:]


# Randomness


def test_loading_leaves_the_global_generators_alone(case, build):
    before = global_states()
    loader = build(Noisy(LENGTH) if case.is_keyed else None)
    list(loader)
    next(loader)
    loader.close()
    assert global_states() == before


@pytest.mark.parametrize("kind", [Noisy, Written])
def test_random_numbers_depend_on_nothing_but_seed_epoch_and_place(name, case, build, kind):
    is_promised = case.is_keyed if kind is Noisy else not case.is_stream
    if case.is_torchs or case.reads_once or not is_promised:
        pytest.skip("not promised here")
    with make("streams_inline" if case.is_stream else "inline", kind(LENGTH)) as inline:
        epochs = [contents(inline) for _ in range(2)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    loader = build(kind(LENGTH))
    assert contents(loader) == epochs[0]
    next(loader), next(loader)
    resumed = build(kind(LENGTH))
    resumed.load_state_dict(saved(loader))
    assert contents(resumed) == epochs[1][2:]
    draws = [draw for epoch in epochs for batch in epoch for row in batch["noise"] for draw in row]
    assert len(set(draws)) == 2 * 3 * LENGTH


# What else loop code asks for


def test_dataset_and_samplers_are_within_reach(case, build):
    loader = build(dataset := Numbers(LENGTH))
    if case.is_stream:
        assert isinstance(loader.dataset, Streamed) and loader.dataset.dataset is dataset
        return
    assert loader.dataset is dataset
    assert list(map(list, loader.batch_sampler)) == ordered(0)
    assert sorted(map(int, loader.sampler)) == list(range(LENGTH))
    assert contents(loader) == ordered(0), "who reads the samplers does not disturb the loader"


def test_libraries_that_rebuild_a_loader_can_read_its_arguments():
    not_read_back = {"self", "sampler", "batch_sampler", "drop_last", "shuffle", "last_batch"}
    for kind, seed in ((WorkerLoader, None), (SeededLoader, 3), (StreamLoader, 3)):
        dataset = Streamed(Numbers(4)) if kind is StreamLoader else Numbers(4)
        arguments = {"seed": seed, "batch_size": 2, "num_workers": 2, "timeout": 7, "max_restarts": 5}
        if seed is not None:
            arguments |= {"rank": 1, "world_size": 2, "pad": False, "on_error": "skip"}
        loader = WorkerLoader(dataset, **arguments)
        assert type(loader) is kind and isinstance(loader, DataLoader)
        signature = inspect.signature(type(loader).__init__).parameters
        assert inspect.signature(DataLoader).parameters.keys() <= signature.keys()
        assert not [parameter for parameter in signature.values() if parameter.kind is parameter.VAR_KEYWORD]
        again = kind(**{name: getattr(loader, name) for name in signature if name not in not_read_back})
        assert {name: getattr(again, name) for name in arguments} == arguments
    for kind in (TorchLoader, ResidentLoader):
        assert issubclass(kind, SeededLoader)
