import itertools
from math import ceil

import numpy as np
import pytest

from loaders.arguments import checked_seed
from loaders.order import Order, permute
from loaders.randomness import fold


def image(length: int, *key: int) -> list[int]:
    return permute(np.arange(length), length, fold(*key)).tolist()


def batches(order: Order, epoch: int = 0) -> list[list[int]]:
    return [order.indices(epoch, order.positions(number)).tolist() for number in range(len(order))]


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 1000, 4095, 4096, 4097])
def test_every_key_gives_a_permutation(length):
    for key in range(20):
        assert sorted(image(length, key)) == list(range(length))


def test_different_keys_give_different_permutations():
    assert len({tuple(image(50, seed, epoch)) for seed in range(10) for epoch in range(10)}) == 100


def test_every_permutation_of_a_few_is_about_as_frequent():
    # 24 arrangements of 4 in 720 epochs: 30 each; chi-squared with 23 degrees of freedom is above 50 once in 1000.
    seen = [tuple(image(4, 0, epoch)) for epoch in range(720)]
    counts = [seen.count(arrangement) for arrangement in itertools.permutations(range(4))]
    assert sum((count - 30) ** 2 / 30 for count in counts) < 50


def test_every_sample_comes_about_as_often_at_every_place():
    # 37 is far from a power of two, so that most walks of the cycle take several rounds.
    epochs = np.array([image(37, 1, epoch) for epoch in range(1850)])
    counts = np.array([np.bincount(column, minlength=37) for column in epochs.T])
    assert np.square(counts - 50).sum() / 50 < 36 * 36 + 5 * (2 * 36 * 36) ** 0.5


def test_the_order_of_a_seed_never_changes():
    # A checkpoint of an older version goes on in the same order: these numbers may not change.
    assert batches(Order(length=10, batch_size=4, shuffle=True, seed=0)) == [[5, 6, 4, 0], [3, 7, 2, 8], [9, 1]]
    assert batches(Order(length=10, batch_size=4, shuffle=True, seed=7), epoch=3) == [
        [7, 2, 3, 8],
        [6, 4, 1, 5],
        [9, 0],
    ]
    assert image(65, 5)[:6] == [59, 2, 1, 44, 3, 7]
    assert image(1025, 5)[:6] == [261, 334, 24, 552, 553, 231]
    assert image(4096, 5)[:6] == [2873, 1644, 4071, 4017, 2212, 1696]
    assert permute(np.arange(3), 10**12, fold(5)).tolist() == [123562960852, 367433517401, 788756492242]


@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.int64(3)])
def test_a_seed_may_be_any_integer_of_64_bits(seed):
    assert type(checked_seed(seed)) is int
    assert Order(1, 1, False, seed).seed == seed


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", None, True])
def test_any_other_seed_is_refused_with_its_value(seed):
    with pytest.raises(ValueError, match=r"give an integer from 0 to 2\^64 - 1") as refusal:
        Order(1, 1, False, seed)
    assert f"seed={seed!r}" in str(refusal.value)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_the_world_does_not_have_is_refused(rank, world_size):
    with pytest.raises(ValueError, match=f"rank={rank} and world_size={world_size}: ranks are numbered from 0"):
        Order(1, 1, False, 0, rank=rank, world_size=world_size)


def test_without_shuffling_indices_are_positions():
    assert batches(Order(length=5, batch_size=2, shuffle=False, seed=3, drop_last=True)) == [[0, 1], [2, 3]]
    assert batches(Order(length=4, batch_size=2, shuffle=False, seed=3, drop_last=True)) == [[0, 1], [2, 3]]
    assert [Order(5, 2, shuffle, 3).kind for shuffle in (False, True)] == ["sequential", "shuffled"]
    assert batches(Order(length=5, batch_size=2, shuffle=False, seed=3), epoch=9) == [[0, 1], [2, 3], [4]]


SHARINGS = list(itertools.product(range(18), (1, 3), (1, 2, 3, 5)))


def shares(length: int, batch_size: int, world_size: int, shuffle: bool = False, **settings) -> list[list[list[int]]]:
    return [
        batches(Order(length, batch_size, shuffle, seed=0, rank=rank, world_size=world_size, **settings))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("drop_last", [False, True])
def test_full_global_batches_are_those_of_a_single_rank(drop_last):
    for length, batch_size, world_size in SHARINGS:
        whole = batches(Order(length, batch_size * world_size, shuffle=True, seed=0, drop_last=drop_last))
        parts = shares(length, batch_size, world_size, shuffle=True, drop_last=drop_last)
        together = [list(itertools.chain(*rows)) for rows in zip(*parts, strict=True)]
        full = length // (batch_size * world_size)
        assert together[:full] == whole[:full]
        if drop_last:
            assert len(together) == len(whole) == full
        elif length % world_size == 0:
            assert together == whole, "what divides by the number of ranks is not padded"


def test_padding_gives_all_ranks_as_many_batches_of_as_many_rows_and_repeats_as_little_as_possible():
    for length, batch_size, world_size in SHARINGS:
        parts = shares(length, batch_size, world_size)
        assert len({tuple(len(batch) for batch in part) for part in parts}) == 1
        rows = [row for part in parts for batch in part for row in batch]
        assert set(rows) == set(range(length))
        rest = length % (batch_size * world_size)
        assert len(rows) == length - rest + world_size * ceil(rest / world_size)


def test_without_padding_each_sample_goes_to_exactly_one_rank_as_evenly_as_possible():
    for length, batch_size, world_size in SHARINGS:
        parts = shares(length, batch_size, world_size, pad=False)
        counts = [sum(len(batch) for batch in part) for part in parts]
        assert sorted(row for part in parts for batch in part for row in batch) == list(range(length))
        assert max(counts) - min(counts) <= 1
        assert all(batch for part in parts for batch in part), "no batch is empty"


def test_samples_before_a_batch_are_those_of_all_ranks():
    order = Order(length=10, batch_size=2, shuffle=True, seed=0, rank=1, world_size=2)
    assert order.global_batch_size == 4
    assert [order.samples_before(number) for number in range(4)] == [0, 4, 8, 10]


# Rollover: what is left over of an epoch begins the next one's first batch.


def rollover(length: int, batch_size: int, **settings) -> Order:
    return Order(**{"shuffle": True, "seed": 5, **settings}, length=length, batch_size=batch_size, rollover=True)


def endless(length: int, shuffle: bool, seed: int, epochs: int) -> list[tuple[int, int, int]]:
    """The concatenation of the epochs: the epoch, position and index of each row."""
    return [
        (epoch, position, index)
        for epoch in range(epochs)
        for position, index in enumerate(image(length, seed, epoch) if shuffle else range(length))
    ]


def cut(rows: list, size: int) -> dict[int, list[list]]:
    """Full batches of the rows, by the epoch of each one's last row."""
    epochs: dict[int, list[list]] = {}
    for start in range(0, len(rows) - size + 1, size):
        batch = rows[start : start + size]
        epochs.setdefault(batch[-1][0], []).append(batch)
    return epochs


def delivered(order: Order, epoch: int, first: int = 0) -> list[list[tuple[int, int, int]]]:
    """The epoch, position and index of each row of this rank's batches."""
    batches = []
    for at, (number, relative, indices) in enumerate(order.batches(epoch, first), first):
        assert number == at
        assert relative.tolist() == order.positions(number, epoch).tolist()
        epochs, positions = order.origins(epoch, relative)
        epochs = np.broadcast_to(epochs, positions.shape)
        batches.append(list(zip(epochs.tolist(), positions.tolist(), indices.tolist(), strict=True)))
    return batches


@pytest.mark.parametrize("case", range(40))
def test_rollover_cuts_the_endless_concatenation_of_the_epochs_into_full_batches(case, monkeypatch):
    dice = np.random.default_rng(case)
    monkeypatch.setattr("loaders.order.BLOCK", int(dice.integers(1, 20)))
    length, batch_size, world_size = (int(dice.integers(1, most)) for most in (40, 8, 6))
    shuffle, seed, epochs = bool(dice.integers(2)), int(dice.integers(100)), 12
    expected = cut(endless(length, shuffle, seed, epochs), batch_size * world_size)
    for epoch in range(epochs):
        batches = expected.get(epoch, [])
        shares = []
        for rank in range(world_size):
            order = rollover(length, batch_size, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
            assert order.batches_in(epoch) == len(batches)
            first = int(dice.integers(len(batches) + 1))
            shares.append(delivered(order, epoch))
            assert delivered(order, epoch, first) == shares[-1][first:], "an epoch can be begun at any batch"
            assert all(len(batch) == batch_size for batch in shares[-1])
        together = [list(itertools.chain(*rows)) for rows in zip(*shares, strict=True)]
        assert together == batches


def test_under_rollover_an_order_has_no_length():
    with pytest.raises(TypeError, match="depends on the epoch"):
        len(rollover(10, 4))
