"""A user's sampler is drawn from with its own seed, and shared among ranks as our own order is."""

import pickle

import pytest
import torch
from example_datasets import global_states

from loaders.order import Order
from loaders.workers import tasks as module
from loaders.workers.tasks import OwnTasks, SamplerTasks, draw, snapshot


def order(length: int, batch_size: int = 4, **settings) -> Order:
    return Order(length, batch_size, settings.pop("shuffle", False), settings.pop("seed", 3), **settings)


def contents(tasks) -> list[tuple]:
    return [(task.epoch, task.number, task.random_key()[1].tolist(), task.indices) for task in tasks]


# Samplers of indices


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 11, 12, 13])
@pytest.mark.parametrize("first", [0, 1])
def test_a_sampler_is_shared_among_ranks_as_our_own_order_is(length, world_size, pad, drop_last, first):
    for rank in range(world_size):
        settings = {"rank": rank, "world_size": world_size, "pad": pad, "drop_last": drop_last}
        ours = order(length, 2, **settings)
        given = contents(SamplerTasks([*range(length)], ours).epoch(1, first))
        assert given == [task for task in contents(OwnTasks(ours).epoch(1, first)) if task[3]]


# What is sent to a worker


def test_a_view_of_a_tensor_is_sent_without_the_tensor():
    class Indices(list):
        pass

    indices = Indices(torch.randperm(100_000)[:4])
    given = snapshot(indices)
    assert type(given) is Indices and given == indices and len(pickle.dumps(list(given))) < 10_000
    indices[:] = [], 1
    assert len(given) == 4


# Drawing


class Noting:
    """An endless sampler that notes the states of the global generators."""

    def __init__(self) -> None:
        self.seen: list = []

    def __iter__(self):
        while True:
            self.seen.append(global_states())
            yield 0


def test_another_thread_does_not_seed_the_global_generators_and_says_so_once(in_thread, bound, caplog):
    module._warn_of_unseeded_drawing.cache_clear()
    sampler, before = Noting(), global_states()
    items = draw(sampler, 1, 2)[0]
    next(items)
    assert not caplog.records
    for _ in range(2):
        in_thread(next, items).result(bound)
    ours, *theirs = sampler.seen
    assert ours != before
    assert theirs == [before] * 2
    (record,) = caplog.records
    assert "the order differs from run to run" in record.message
