"""Which engine a WorkerLoader's arguments give; tests/loaders/workers/test_epochs.py has what uses it."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from example_datasets import Numbers

from loaders import WorkerLoader
from loaders.randomness import fold
from loaders.workers import engine as module
from loaders.workers import process_pool
from loaders.workers.engine import SPARE_SLOTS, build_engine


class Written(Numbers):
    def sample_spec(self) -> dict:
        return {"index": ((16,), torch.float32)}

    def read_batch(self, indices, out, random) -> None:
        raise NotImplementedError


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


def test_without_workers_the_caller_reads_nothing_ahead_and_there_are_no_slots(built, caplog):
    given = built(num_workers=0, seed=0)
    assert (given.dispatcher[0], given.dispatcher[2](1)) == ("InlinePool", 0)
    assert given.ring[0] == 0
    assert not caplog.messages


def test_a_system_without_worker_processes_reads_in_threads_and_says_so(built, monkeypatch, caplog):
    monkeypatch.setattr(module, "HAS_PROCESSES", False)
    module.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="loaders"):
        assert built(num_workers=1, seed=0).dispatcher[0] == "ThreadPool"
        assert built(num_workers=1, seed=0, worker_method="thread").dispatcher[0] == "ThreadPool"
    (said,) = caplog.messages
    assert said.startswith("worker processes need Linux")


@pytest.mark.parametrize(
    ("pin_memory", "holds", "has_cuda"),
    [(True, True, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_slots_are_page_locked_for_a_gpu_where_batches_are_held_until_copied(
    built, monkeypatch, pin_memory, holds, has_cuda
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    given = built(num_workers=1, pin_memory=pin_memory, pins=holds)
    assert given.ring[2] == (pin_memory and holds and has_cuda)


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"seed": 0}, [128]),
        ({"seed": 0, "batch_size": 1, "batch_sampler": [[0, 1], [2]]}, [64]),
        ({"seed": None}, []),
        ({"seed": 0, "batch_size": None}, []),
    ],
)
def test_slots_fit_a_batch_whose_size_the_dataset_tells(built, settings, fits):
    assert built(Written(8), num_workers=1, **settings).fits == fits


def test_worker_processes_get_their_settings(built):
    given = built(num_workers=2, worker_init_fn=print, timeout=4, seed=0).ProcessPool
    assert (given[1], given[4:]) == (2, (print, 4, 2))
    given = built(num_workers=2, worker_init_fn=print, timeout=4, seed=0, worker_method="thread").ThreadPool
    assert given[1:] == (2, print, 4)


@pytest.mark.parametrize("method", [None, "spawn"])
def test_worker_processes_start_by_the_method_that_was_named(built, method):
    context = built(num_workers=1, multiprocessing_context=method).ProcessPool[2]
    assert context.get_start_method() == (method or "fork")


@pytest.mark.parametrize(("seed", "rank"), [(0, 0), (5, 0), (5, 1)])
def test_workers_start_with_a_seed_that_depends_on_the_loaders_and_its_rank(built, seed, rank):
    first = built(num_workers=1, seed=seed, rank=rank, world_size=2).ProcessPool[3]
    assert first == int(fold(seed, rank) >> np.uint64(2)) < 1 << 62
    assert built(num_workers=1, seed=seed, rank=rank, world_size=2, base_seed=0).ProcessPool[3] == 0
    assert built(num_workers=1).ProcessPool[3] == int(fold(0, 0) >> np.uint64(2))


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("in_order", [True, False])
def test_only_torchs_way_gives_tasks_in_turn(built, seed, in_order):
    given = built(num_workers=1, seed=seed, in_order=in_order, max_restarts=9, on_error="skip")
    assert given.dispatcher[3:7] == (seed is None and in_order, in_order, 9, True)
    assert built(num_workers=1).dispatcher[6] is False
