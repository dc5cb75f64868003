"""Random numbers that are a function of a key: see loaders.Random."""

import random

import numpy as np
import pytest
import torch
from example_datasets import Numbers, global_states, outcomes
from hypothesis import given
from hypothesis import strategies as st

from loaders import Random, WorkerLoader

KEYS = st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=4)


@given(KEYS, KEYS)
def test_any_other_key_gives_other_numbers_and_the_same_key_the_same(first, second):
    is_same = [key % 2**64 for key in first] == [key % 2**64 for key in second]
    numbers = Random(*first).uniform(2)
    assert np.array_equal(numbers, Random(*second).uniform(2)) == is_same


def test_the_numbers_of_a_key_never_change():
    # A resumed run goes on with the same numbers in a later version: these may not change.
    assert [int(value * 2**53) for value in Random(0, 1, 2).uniform(2)] == [350586810411944, 6053972482659347]


def test_numbers_are_uniform_from_0_to_below_1():
    numbers = Random(0, np.arange(1000)).uniform(100)
    assert numbers.dtype == np.float64
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = np.bincount((numbers * 100).astype(int).ravel(), minlength=100)
    chi_squared = np.square(counts - 1000).sum() / 1000
    assert chi_squared < 99 + 5 * (2 * 99) ** 0.5


def test_a_row_is_a_function_of_its_own_key_and_every_draw_is_fresh():
    positions = np.array([7, 8, 9])
    indices = np.array([100, 5, 100])
    together = Random(0, 2, positions, indices)
    alone = Random(0, 2, positions[1:2], indices[1:2])
    draws = [(together.uniform(count), alone.uniform(count)) for count in (4, 1, 4)]
    for whole, row in draws:
        assert whole[1].tolist() == row[0].tolist()
    assert len(np.unique(np.concatenate([whole for whole, _ in draws], axis=1))) == 3 * 9


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_generator_is_a_function_of_the_key_and_the_draw(device):
    first_of_key = Random(0, 1)
    same = Random(0, 1)
    first, second = (torch.rand(3, generator=first_of_key.generator(device), device=device) for _ in range(2))
    assert torch.equal(first, torch.rand(3, generator=same.generator(device), device=device))
    assert not torch.equal(first, second)


class Draws(Numbers):
    """Sample i is a draw from each global generator, and the number of threads that torch computes with."""

    def __getitem__(self, index):
        if index == 3:
            raise ValueError("bad")
        return [random.random(), np.random.random(), torch.rand(()).item(), torch.get_num_threads()]


def test_inline_the_global_generators_and_threads_are_put_back_whatever_a_sample_draws_or_raises():
    torch.set_num_threads(2)
    try:
        states = global_states()
        with WorkerLoader(Draws(4), 1, seed=0) as loader:
            *batches, error = outcomes(loader)
        assert global_states() == states and torch.get_num_threads() == 2
        assert error == "bad" and len({draw for batch in batches for (draw,) in batch[:3]}) == 9
        assert [batch[3] for batch in batches] == [[1]] * 3, "as in a worker: the last bits of a sum depend on it"
    finally:
        torch.set_num_threads(1)
