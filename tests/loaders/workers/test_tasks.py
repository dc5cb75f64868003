"""A user's sampler is drawn from with its own seed, and shared among ranks as our own order is."""

import itertools
import random
import threading

import numpy as np
import pytest
import torch

from loaders.order import Order
from loaders.workers import tasks as module
from loaders.workers.tasks import OwnTasks, SamplerError, SamplerTasks, draw


def order(length: int, batch_size: int = 4, **settings) -> Order:
    return Order(length, batch_size, settings.pop("shuffle", False), settings.pop("seed", 3), **settings)


def contents(tasks) -> list[tuple]:
    return [(task.epoch, task.number, task.positions.tolist(), task.indices) for task in tasks]


class Endless:
    """A sampler without a length or an end, which draws each index when it is asked for it."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self):
        while True:
            self.given += 1
            yield random.random() + np.random.random() + torch.rand(()).item()


class Sized(Endless):
    """The same with a length, so that it is drawn from when its epoch begins."""

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        return itertools.islice(super().__iter__(), 5)


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


# Batch samplers


def test_batches_are_taken_as_they_are_and_their_rows_are_counted():
    batches = [[1, 2], (3,), [4, 5, 6]]
    tasks = SamplerTasks(batches, order(3, 1), "batch_sampler")
    assert contents(tasks.epoch(4, 0)) == [
        (4, 0, [0, 1], [1, 2]),
        (4, 1, [2], (3,)),
        (4, 2, [3, 4, 5], [4, 5, 6]),
    ]
    assert contents(tasks.epoch(4, 2)) == [(4, 2, [3, 4, 5], [4, 5, 6])]


# Drawing


def states() -> list:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("sampler", [Sized(), Endless()], ids=["sized", "endless"])
def test_what_a_sampler_draws_depends_on_seed_and_epoch_alone(sampler):
    def first_five(seed: int, epoch: int) -> list[float]:
        items = []
        for item in itertools.islice(draw(sampler, seed, epoch)[0], 5):
            random.random(), np.random.random(), torch.rand(())  # the training loop draws too
            items.append(item)
        return items

    assert first_five(1, 2) == first_five(1, 2)
    assert len(set(first_five(1, 2))) == 5
    assert not {*first_five(1, 2)} & {*first_five(1, 3), *first_five(2, 2)}


def test_another_thread_does_not_seed_the_global_generators(in_thread, bound):
    seeds = []

    class Noting:
        def __iter__(self):
            for _ in range(2):
                seeds.append((threading.get_ident(), states()))
                yield 0

    items = draw(Noting(), 1, 2)[0]
    next(items)
    before = states()
    in_thread(next, items).result(bound)
    (_, ours), (_, theirs) = seeds
    assert ours != before
    assert theirs == before


class Failing:
    """Raises after two indices."""

    def __iter__(self):
        yield from (0, 1)
        raise ValueError("no more")


class FailingSized(Failing):
    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize("sampler", [Failing(), FailingSized()], ids=["endless", "sized"])
def test_a_samplers_error_comes_after_the_items_before_it(sampler):
    before = states()
    items = draw(sampler, 0, 0)[0]
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(SamplerError) as error:
        next(items)
    assert str(error.value.__cause__) == "no more"
    assert states() == before


def test_a_sampler_that_another_thread_iterates_without_seeding_is_logged_once(in_thread, bound, caplog):
    module._warn_of_unseeded_drawing.cache_clear()
    items = draw(Endless(), 1, 2)[0]
    next(items)
    assert not caplog.records
    for _ in range(2):
        in_thread(next, items).result(bound)
    (record,) = caplog.records
    assert "the order differs from run to run" in record.message
