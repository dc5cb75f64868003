"""Our own order as a sampler, and what is done with samplers of users, one by one."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loaders.order import Order
from loaders.samplers import OrderSampler, length_of, own_batch_sampler, own_generator_of, pass_on_epoch

ORDERS = [
    Order(length, 4, True, 3, drop_last, rank, world_size, pad)
    for length in (0, 1, 8, 21)
    for drop_last in (False, True)
    for pad in (False, True)
    for world_size in (1, 3)
    for rank in range(world_size)
]
ROLLOVERS = [
    Order(length, 4, True, 3, rank=rank, world_size=world_size, rollover=True)
    for length in (0, 1, 5, 8, 21)
    for world_size in (1, 3)
    for rank in range(world_size)
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_sampler_has_as_many_indices_as_it_says_and_they_are_the_orders(order):
    sampler = OrderSampler(order)
    expected = [index for _, _, indices in order.batches(0) for index in indices.tolist()]
    assert list(sampler) == expected
    assert len(sampler) == len(expected)


@pytest.mark.parametrize("order", ROLLOVERS, ids=str)
def test_under_rollover_a_samplers_length_is_that_of_the_epoch_which_the_next_iter_runs(order):
    sampler = OrderSampler(order)
    sampled = own_batch_sampler(sampler, 4, False)
    for epoch in (0, 1, 2, 3, 17, 18):
        if epoch != 18:  # the next one by itself
            sampler.set_epoch(epoch)
        expected = [indices.tolist() for _, _, indices in order.batches(epoch)]
        assert len(sampled) == len(expected)
        assert len(sampler) == 4 * len(expected)
        assert list(sampled) == expected


class Sampler:
    """Notes the epochs that it is told; may hold another sampler."""

    def __init__(self, inner=None) -> None:
        self.epochs: list[int] = []
        self.sampler = inner

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_an_epoch_is_passed_on_to_samplers_inside_samplers_once():
    innermost = Sampler()
    outer = Sampler(SimpleNamespace(sampler=Sampler(innermost)))
    pass_on_epoch(3, outer, outer.sampler, None, innermost)
    for sampler in (outer, outer.sampler.sampler, innermost):
        assert sampler.epochs == [3]


class NotImplementedLength:
    def __len__(self) -> int:
        raise NotImplementedError


class FaultyLength:
    def __len__(self) -> int:
        raise ValueError("a fault")


def test_a_length_that_is_unknown_is_very_large():
    assert length_of(range(3)) == 3
    assert length_of(iter([])) == sys.maxsize
    assert length_of(NotImplementedLength()) == sys.maxsize
    with pytest.raises(ValueError, match="a fault"):
        length_of(FaultyLength())


@pytest.mark.parametrize(
    "generator", [torch.Generator(), np.random.default_rng(), np.random.RandomState(), random.Random()]
)
def test_a_generator_is_found_by_name_in_samplers_inside_too(generator):
    inner = Sampler()
    assert own_generator_of(None, Sampler(inner), Sampler()) is None
    inner.dice = generator
    assert own_generator_of(None, Sampler(SimpleNamespace(sampler=inner))) == "Sampler.dice"
    assert own_generator_of([1, 2], inner) == "Sampler.dice"
