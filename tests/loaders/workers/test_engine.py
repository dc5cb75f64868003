"""Which engine a WorkerLoader's arguments give; tests/loaders/workers/test_epochs.py has what uses it."""

from types import SimpleNamespace

import numpy as np
import pytest
from example_datasets import Numbers

from loaders import WorkerLoader
from loaders.randomness import fold
from loaders.workers import engine as module
from loaders.workers import process_pool
from loaders.workers.dispatcher import SPARE_SLOTS
from loaders.workers.engine import build_engine


@pytest.fixture
def built(monkeypatch):
    """Builds an engine of parts that are none, and returns what each was given."""

    def build(dataset=None, base_seed: int | None = None, pins: bool = False, **settings) -> SimpleNamespace:
        given = SimpleNamespace(fits=[])

        def part(name: str, value=None):
            def make(*args, **named):
                setattr(given, name, (*args, *named.values()))
                return value or name

            return make

        ring = SimpleNamespace(fit=given.fits.append)
        monkeypatch.setattr(module, "SlotRing", part("ring", ring))
        for pool in ("ThreadPool", "InlinePool"):
            monkeypatch.setattr(module, pool, part(pool))
        monkeypatch.setattr(process_pool, "ProcessPool", part("ProcessPool"))
        monkeypatch.setattr(module, "Dispatcher", part("dispatcher", SimpleNamespace(stats=None)))
        loader = WorkerLoader(Numbers(8) if dataset is None else dataset, **{"batch_size": 2, **settings})
        loader.holds_batches_until_copied = pins
        build_engine(loader, base_seed)
        return given

    return build


@pytest.mark.parametrize(
    ("settings", "depth"),
    [({}, 4), ({"prefetch_factor": 4}, 8), ({"prefetch_factor": 0}, 1), ({"prefetch_batches": 5}, 5)],
)
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_pool_loads_as_many_batches_ahead_as_it_was_told_and_has_slots_for_them(built, settings, depth, method):
    given = built(num_workers=2, worker_method=method, **settings)
    assert given.dispatcher[2](2) == depth
    assert given.ring == (depth + SPARE_SLOTS, method == "multiprocessing", False)
    assert given.dispatcher[0] == ("ProcessPool" if method == "multiprocessing" else "ThreadPool")


@pytest.mark.parametrize(("seed", "rank"), [(0, 0), (5, 0), (5, 1)])
def test_workers_start_with_a_seed_that_depends_on_the_loaders_and_its_rank(built, seed, rank):
    first = built(num_workers=1, seed=seed, rank=rank, world_size=2).ProcessPool[3]
    assert first == int(fold(seed, rank) >> np.uint64(2)) < 1 << 62
    assert built(num_workers=1, seed=seed, rank=rank, world_size=2, base_seed=0).ProcessPool[3] == 0
    assert built(num_workers=1).ProcessPool[3] == int(fold(0, 0) >> np.uint64(2))
