"""A large job without the machines: 1,024 ranks that share 1,000,000,000 samples.

No test reads all samples. Which rows a rank takes is arithmetic, so it is checked for all ranks on some batches, and
by addition for the epoch.
"""

import json
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
from example_datasets import Numbers, contents

from loaders import Preloader, TorchLoader, WorkerLoader
from loaders import order as order_module
from loaders.order import BLOCK, Order, permute

LENGTH = 10**9
GLOBAL_BATCH = 3072  # three samples for each of 1,024 ranks, four for each of 768
REST = LENGTH % GLOBAL_BATCH
BATCHES = LENGTH // GLOBAL_BATCH
WAYS: dict[str, dict[str, Any]] = {"drop": {"drop_last": True}, "keep": {"pad": False}, "rollover": {"rollover": True}}


def order_of(rank: int, world_size: int, length: int = LENGTH, **settings) -> Order:
    """The order as one rank sees it."""
    settings = {"shuffle": True, "seed": 9, "rank": rank, "world_size": world_size, **settings}
    return Order(length, GLOBAL_BATCH // world_size, **settings)


def ranks(world_size: int, length: int = LENGTH, **settings) -> list[Order]:
    """The order as each rank sees it."""
    return [order_of(rank, world_size, length, **settings) for rank in range(world_size)]


def positions(orders: list[Order], number: int, epoch: int) -> list[int]:
    """The positions of a global batch, one rank after the other."""
    return np.concatenate([order.positions(number, epoch) for order in orders]).tolist()


# Order


@pytest.mark.parametrize("epoch", [0, 5, 10**6])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1024, 768])
def test_the_ranks_rows_follow_each_other_without_a_gap_or_an_overlap(world_size, way, epoch):
    orders = ranks(world_size, **WAYS[way])
    count, carried = orders[0].batches_in(epoch), orders[0].carried(epoch)
    assert {order.batches_in(epoch) for order in orders} == {count}
    some = np.random.default_rng(0).integers(count - 1, size=10).tolist()
    for number in (0, 1, *some, count - 2):
        start = number * GLOBAL_BATCH - carried
        assert positions(orders, number, epoch) == list(range(start, start + GLOBAL_BATCH))
    last = positions(orders, count - 1, epoch)
    end = {"drop": LENGTH - REST, "keep": LENGTH, "rollover": LENGTH - orders[0].carried(epoch + 1)}[way]
    assert last == list(range((count - 1) * GLOBAL_BATCH - carried, end))


# Loaders


def over_workers(*args: Any, **settings: Any) -> Preloader:
    return Preloader(WorkerLoader(*args, num_workers=2, persistent_workers=True, **settings), "cpu", 2)


LOADERS = {"torch": TorchLoader, "inline": partial(WorkerLoader, persistent_workers=True), "processes": over_workers}


@pytest.fixture(params=LOADERS.values(), ids=LOADERS)
def make(request, closed_later):
    def make(rank: int, world_size: int, **settings):
        settings = {"shuffle": True, "seed": 9, "rank": rank, "world_size": world_size, **settings}
        return closed_later(request.param(Numbers(LENGTH), GLOBAL_BATCH // world_size, **settings))

    return make


def expected_batches(epoch: int, first: int, count: int, world_size: int, rank: int, **settings) -> list[list[int]]:
    order = order_of(rank, world_size, **settings)
    return [order.indices(epoch, order.positions(first + at, epoch)).tolist() for at in range(count)]


def take(loader, count: int) -> list[list[int]]:
    iterator = iter(loader)
    return contents(next(iterator) for _ in range(count))


@pytest.fixture
def permuted(monkeypatch):
    """Counts the positions whose samples are computed."""
    counts: list[int] = []

    def counted(positions: np.ndarray, length: int, key: np.ndarray) -> np.ndarray:
        counts.append(len(positions))
        return permute(positions, length, key)

    monkeypatch.setattr(order_module, "permute", counted)
    return counts


@pytest.mark.parametrize("number", [123_456, BATCHES - 3])
@pytest.mark.parametrize("last_batch", ["drop", "rollover"])
def test_a_rank_starts_and_resumes_anywhere_in_an_epoch_at_the_cost_of_a_few_batches(
    make, last_batch, number, permuted
):
    way = WAYS[last_batch]
    tracemalloc.start()
    try:
        first = make(517, 1024, last_batch=last_batch)
        assert take(first, 2) == expected_batches(0, 0, 2, 1024, 517, **way)
        state = {**first.state_dict(), "epoch": 7, "samples": number * GLOBAL_BATCH}
        loader = make(517, 1024, last_batch=last_batch)
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert take(loader, 2) == expected_batches(7, number, 2, 1024, 517, **way)
        assert loader.state_dict() == {**state, "samples": (number + 2) * GLOBAL_BATCH}
        assert len(loader) in (BATCHES, BATCHES + 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(permuted) < 10 * BLOCK
    assert peak < 16 * 2**20, "bytes; the permutation alone would need 8 GB"
