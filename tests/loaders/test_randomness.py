import random

import numpy as np
import pytest
import torch
from example_datasets import Numbers, contents, global_states

from loaders import WorkerLoader
from loaders.randomness import Random, fold, preserved_globals, seed_globals


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def test_any_other_key_gives_other_numbers():
    keys = [(0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**63,), (2**64 - 2,), (0, 0, 0)]
    assert len({tuple(Random(*key).uniform(2)) for key in keys}) == len(keys)


def test_the_numbers_of_a_key_never_change():
    # A resumed run goes on with the same numbers in a later version: these may not change.
    assert [int(value * 2**53) for value in Random(0, 1, 2).uniform(2)] == [350586810411944, 6053972482659347]


def test_numbers_are_uniform_from_0_to_below_1():
    numbers = Random(0, np.arange(1000)).uniform(100)
    assert numbers.dtype == np.float64
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = np.bincount((numbers * 100).astype(int).ravel(), minlength=100)
    assert np.square(counts - 1000).sum() / 1000 < 99 + 5 * (2 * 99) ** 0.5


def test_a_row_is_a_function_of_its_own_key():
    positions, indices = np.array([7, 8, 9]), np.array([100, 5, 100])
    together = Random(0, 2, positions, indices)
    alone = Random(0, 2, positions[1:2], indices[1:2])
    for _ in range(2):
        assert together.uniform(4)[1].tolist() == alone.uniform(4)[0].tolist()


def test_every_draw_is_fresh():
    stream = Random(0, np.arange(4))
    numbers = np.concatenate([stream.uniform(2), stream.uniform(1), stream.uniform(2)], axis=1)
    assert len(np.unique(numbers)) == 4 * 5


@pytest.mark.parametrize(("key", "shape"), [((1, 2), (3,)), ((1, np.arange(5)), (5, 3)), ((np.arange(0),), (0, 3))])
def test_a_draw_has_a_row_for_each_element_of_the_key(key, shape):
    assert Random(*key).uniform(3).shape == shape


def test_integers_and_arrays_of_one_are_the_same_key():
    for number in (0, 5, -1, 2**40):
        assert fold(number, 3) == fold(np.array([number]), 3)[0] == fold(np.int64(number), 3)


def test_a_generator_is_a_function_of_the_key_and_the_draw():
    one, same = Random(0, 1), Random(0, 1)
    first = torch.rand(3, generator=one.generator())
    assert torch.equal(first, torch.rand(3, generator=same.generator()))
    assert not torch.equal(first, torch.rand(3, generator=one.generator()))


@pytest.mark.cuda
def test_a_generator_can_be_on_the_device():
    stream, same = Random(0, 1), Random(0, 1)
    numbers = torch.rand(3, generator=stream.generator("cuda"), device="cuda")
    assert torch.equal(numbers, torch.rand(3, generator=same.generator("cuda"), device="cuda"))


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1, int(fold(0, 0))])
def test_all_three_global_generators_are_seeded(key):
    seed_globals(key)
    first = draws()
    seed_globals(key)
    assert draws() == first
    seed_globals(key ^ 1)
    assert all(now != then for now, then in zip(draws(), first, strict=True))


def test_the_global_generators_are_preserved_whatever_a_block_draws_or_raises():
    before = global_states()
    with preserved_globals():
        seed_globals(5)
        draws()
    assert global_states() == before
    with pytest.raises(ValueError, match="inside"), preserved_globals():
        draws()
        raise ValueError("inside")
    assert global_states() == before


class Threads(Numbers):
    """Sample i is the number of threads that torch computes it with, on which the last bits of a sum depend."""

    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()


def test_with_a_seed_samples_are_computed_in_one_thread_as_in_a_worker():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert contents(WorkerLoader(Threads(2), 2, seed=0)) == [[1, 1]]
        assert contents(WorkerLoader(Threads(2), 2)) == [[3, 3]]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
