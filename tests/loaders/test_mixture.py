"""Mixtures: shares of parts, walks through each part, and an order that is exact everywhere and after each resume."""

import numpy as np
import pytest
from every_loader import MIXED, saved
from example_datasets import Numbers, contents
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders import LoaderConfigError, Mixture, Random, WorkerLoader
from loaders.order import Order


def walk(mixture, count, seed=0):
    return mixture.indices(seed, np.arange(count))


PART = st.tuples(st.integers(1, 3000), st.one_of(st.just(0.0), st.floats(0.0001, 1)))


@given(st.lists(PART, min_size=1, max_size=4).filter(lambda parts: any(weight for _, weight in parts)), st.integers(0))
@settings(max_examples=25, deadline=None)
def test_parts_have_their_shares_and_repeat_a_sample_only_when_they_have_given_all_others(parts, seed):
    mixture = Mixture(*zip(*parts, strict=True))
    count = 3 * 4096 + 1000
    order = walk(mixture, count, seed % 2**64)
    ends = np.cumsum(mixture.lengths)
    for part, (length, weight) in enumerate(parts):
        mine = order[np.searchsorted(ends, order, side="right") == part]
        share = weight / sum(mixture.weights)
        spread = (share * (1 - share) * count) ** 0.5
        assert abs(len(mine) - share * count) <= max(1, 3 * spread)
        rounds = [mine[at : at + length] for at in range(0, len(mine), length)]
        assert all(len(np.unique(walked)) == len(walked) for walked in rounds)
        assert length < 50 or len(rounds) < 3 or not np.array_equal(rounds[0], rounds[1])


def test_the_order_of_a_mixture_never_changes_is_shuffled_and_starts_anywhere_in_a_hundred_million():
    assert walk(MIXED, 8).tolist() == [15, 3, 1, 11, 10, 6, 4, 13]
    huge = Mixture((10**8 - 10**6, 10**6), (0.3, 0.7))
    order = Order(10**8, 4, True, 5, mixture=huge)
    assert order.indices(10**6, order.positions(10**7)).tolist() == [35995472, 99006931, 99536804, 99092190]
    parts = walk(Mixture((50, 50), (1, 1)), 4096) < 50
    assert 900 < (parts[1:] != parts[:-1]).sum() < 2 * 2048 - 900  # runs as of a coin, not in turn


def test_weights_that_changed_within_an_epoch_are_refused_with_both_values_and_so_is_what_cannot_work():
    with WorkerLoader(Numbers(18), 4, sampler=MIXED, seed=0) as loader:
        next(loader)
        state = saved(loader)
        contents(loader)
        at_end = saved(loader)
    assert state["order"] == "mix"
    weights = r"'weights': \[0.7, 0.3\].*'weights': \[1.0, 1.0\]"
    even = Mixture((13, 5), (1, 1))
    with WorkerLoader(Numbers(18), 4, sampler=even, seed=0) as other, pytest.raises(ValueError, match=weights):
        other.load_state_dict(at_end)  # between epochs they may change
        other.load_state_dict(state)
    for weights in ((0, 0), (1, -1), (1, 1e-9), (1, float("nan"))):
        with pytest.raises(LoaderConfigError, match="give each part at least"):
            Mixture((1, 2), weights)
    with pytest.raises(LoaderConfigError, match="give the empty ones 0"):
        Mixture((0, 2), (1, 1))
    with pytest.raises(ValueError, match="not one of the dataset's 9 samples"):
        WorkerLoader(Numbers(9), 4, sampler=MIXED, seed=0)
    with pytest.raises(ValueError, match="seed"):
        WorkerLoader(Numbers(18), 4, sampler=MIXED)


def test_rows_of_a_random_give_the_numbers_that_they_give_together():
    whole, apart = (Random(0, 1, np.arange(5), np.arange(5)) for _ in range(2))
    assert np.array_equal(whole.uniform(2), apart.uniform(2))
    rows = np.array([4, 1])
    assert np.array_equal(apart.of_rows(rows).uniform(3), whole.uniform(3)[rows])
