"""The order: permutations that are computed, shares of ranks, a billion samples, and batches that roll over."""

import itertools
import json
import tracemalloc
from math import ceil

import numpy as np
import pytest
from every_loader import make
from example_datasets import Numbers, contents
from example_samplers import Made
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders import RolloverBatches, WorkerLoader
from loaders.order import Order, permute
from loaders.randomness import fold


def image(length, *key):
    return permute(np.arange(length), length, fold(*key)).tolist()


def batches(order, epoch=0):
    return [order.indices(epoch, order.positions(number)).tolist() for number in range(len(order))]


# Permutations


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_every_key_gives_a_permutation(length, key):
    assert sorted(image(length, key)) == list(range(length))


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_an_index_is_the_same_however_many_are_computed_at_once(length, key):
    some = np.arange(0, length, 1 + length // 5)
    by_threes = [permute(some[first : first + 3], length, fold(key)) for first in range(0, len(some), 3)]
    of_a_key_each = permute(np.arange(length), length, np.repeat(fold(key), length))
    assert np.concatenate(by_threes).tolist() == of_a_key_each[some].tolist()
    assert of_a_key_each.tolist() == image(length, key)


def test_every_permutation_of_a_few_is_about_as_frequent_and_every_sample_at_every_place():
    # 24 arrangements of 4 in 240 epochs: 10 each; chi-squared with 23 degrees of freedom is above 50 once in 1000.
    seen = [tuple(image(4, 0, epoch)) for epoch in range(240)]
    counts = [seen.count(arrangement) for arrangement in itertools.permutations(range(4))]
    assert sum((count - 10) ** 2 / 10 for count in counts) < 50
    # 37 is far from a power of two, so that most walks of the cycle take several rounds.
    epochs = np.array([image(37, 1, epoch) for epoch in range(370)])
    table = np.array([np.bincount(column, minlength=37) for column in epochs.T])
    freedom = 36 * 36
    assert np.square(table - 10).sum() / 10 < freedom + 5 * (2 * freedom) ** 0.5


def test_the_order_of_a_seed_never_changes():
    # A checkpoint of an older version goes on in the same order: these numbers may not change.
    assert batches(Order(length=10, batch_size=4, shuffle=True, seed=0)) == [[5, 6, 4, 0], [3, 7, 2, 8], [9, 1]]
    assert batches(Order(10, 4, True, 7), epoch=3) == [[7, 2, 3, 8], [6, 4, 1, 5], [9, 0]]
    assert image(65, 5)[:6] == [59, 2, 1, 44, 3, 7]
    assert image(1025, 5)[:6] == [261, 334, 24, 552, 553, 231]
    assert image(4096, 5)[:6] == [2873, 1644, 4071, 4017, 2212, 1696]
    assert permute(np.arange(3), 10**12, fold(5)).tolist() == [123562960852, 367433517401, 788756492242]


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", None, True])
def test_a_seed_is_an_integer_of_64_bits_or_is_refused_with_its_value(seed):
    with pytest.raises(ValueError, match=r"from 0 to 2\^64 - 1") as refusal:
        Order(1, 1, False, seed)
    assert f"seed={seed!r}" in str(refusal.value)
    assert Order(1, 1, False, 2**64 - 1).seed == 2**64 - 1
    assert type(Order(1, 1, False, np.int64(3)).seed) is int


# Shares

SIZES = {"length": st.integers(0, 40), "batch_size": st.integers(1, 4), "world_size": st.integers(1, 5)}


def shares(length, batch_size, world_size, shuffle=False, **settings):
    orders = [
        Order(length, batch_size, shuffle, 0, rank=r, world_size=world_size, **settings) for r in range(world_size)
    ]
    assert {order.global_batch_size for order in orders} == {batch_size * world_size}
    return [batches(order) for order in orders]


@given(**SIZES)
@settings(max_examples=40)
def test_full_global_batches_are_those_of_a_single_rank(length, batch_size, world_size):
    for drop_last in (False, True):
        whole = batches(Order(length, batch_size * world_size, shuffle=True, seed=0, drop_last=drop_last))
        parts = shares(length, batch_size, world_size, shuffle=True, drop_last=drop_last)
        together = [list(itertools.chain(*rows)) for rows in zip(*parts, strict=True)]
        full = length // (batch_size * world_size)
        assert together[:full] == whole[:full]
        if drop_last or length % world_size == 0:  # what divides by the number of ranks is not padded
            assert together == whole


@given(**SIZES)
def test_padding_gives_all_ranks_as_many_rows_and_repeats_as_few_as_possible(length, batch_size, world_size):
    parts = shares(length, batch_size, world_size)
    assert len({tuple(len(batch) for batch in part) for part in parts}) == 1
    rows = [row for part in parts for batch in part for row in batch]
    assert set(rows) == set(range(length))
    rest = length % (batch_size * world_size)
    assert len(rows) == length - rest + world_size * ceil(rest / world_size)


@given(**SIZES)
def test_without_padding_each_sample_goes_to_exactly_one_rank_as_evenly_as_possible(length, batch_size, world_size):
    parts = shares(length, batch_size, world_size, pad=False)
    counts = [sum(len(batch) for batch in part) for part in parts]
    assert sorted(row for part in parts for batch in part for row in batch) == list(range(length))
    assert max(counts) - min(counts) <= 1
    assert all(batch for part in parts for batch in part), "no batch is empty"


# A large job without the machines: 1,024 ranks that share 1,000,000,000 samples

LENGTH = 10**9
GLOBAL_BATCH = 3072  # three samples for each of 1,024 ranks, four for each of 768


@pytest.mark.parametrize("kind", ["torch", "inline", "preloader"])
def test_a_rank_starts_and_resumes_anywhere_in_a_billion_samples_at_the_cost_of_a_few_batches(kind):
    def loader():
        return make(kind, Numbers(LENGTH), 3, seed=9, rank=517, world_size=1024)

    def expected(epoch, first):
        order = Order(LENGTH, 3, True, 9, rank=517, world_size=1024)
        return [order.indices(epoch, order.positions(number)).tolist() for number in (first, first + 1)]

    tracemalloc.start()
    try:
        with loader() as first:
            assert contents(itertools.islice(iter(first), 2)) == expected(0, 0)
            state = {**first.state_dict(), "epoch": 7, "samples": 123_456 * GLOBAL_BATCH}
        with loader() as resumed:
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert contents(itertools.islice(iter(resumed), 2)) == expected(7, 123_456)
            assert resumed.state_dict() == {**state, "samples": 123_458 * GLOBAL_BATCH}
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20, "bytes; the permutation alone would need 8 GB"
    finally:
        tracemalloc.stop()


def test_a_sampler_of_20_million_starts_at_once_and_is_drawn_as_it_is_needed():
    indices = itertools.count()
    sampler = Made(lambda: indices)
    sampler.length = 20_000_000
    with WorkerLoader(Numbers(20_000_000), 4, sampler=sampler, num_workers=2, seed=0) as loader:
        assert contents(itertools.islice(iter(loader), 3)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert len(loader) == 5_000_000
    assert next(indices) < 100_000


# Batches that roll over to the next epoch


@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 8),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=15)
def test_rollover_cuts_the_endless_concatenation_of_the_epochs_into_full_batches(
    length, batch_size, world_size, seed, data
):
    """Ranks are disjoint, no sample is lost or comes twice, and a batch depends on nothing but set_epoch."""
    size = batch_size * world_size
    epochs = 5

    def samplers():
        return [RolloverBatches(length, batch_size, seed, rank, world_size) for rank in range(world_size)]

    def epoch_of(sampler, epoch):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(sampler) == len(batches)
        return batches

    shares = [[epoch_of(sampler, epoch) for sampler in samplers()] for epoch in range(epochs)]
    together = [itertools.chain(*parts) for share in shares for parts in zip(*share, strict=True)]
    rows = list(itertools.chain(*together))
    assert {len(batch) for share in shares for part in share for batch in part} <= {batch_size}
    assert len(rows) == epochs * length // size * size
    whole = Order(length, length, shuffle=True, seed=seed)
    assert rows == list(itertools.chain(*(batches(whole, epoch)[0] for epoch in range(epochs))))[: len(rows)]
    running = samplers()
    for epoch in data.draw(st.permutations(range(epochs))):
        assert [epoch_of(sampler, epoch) for sampler in running] == shares[epoch]
