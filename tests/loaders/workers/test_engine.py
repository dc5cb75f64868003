"""Which engine a WorkerLoader's arguments give, and how its epochs use it: the engine notes what it is asked for."""

import logging
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from example_datasets import Numbers

from loaders import WorkerLoader, worker_loader
from loaders.base import INTERRUPTED, Delivery
from loaders.randomness import fold
from loaders.workers import engine as module
from loaders.workers import process_pool
from loaders.workers.dispatcher import SPARE_SLOTS
from loaders.workers.engine import build_engine


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

        ring = SimpleNamespace(fd=7, fit=given.fits.append)
        monkeypatch.setattr(module, "SlotRing", part("ring", ring))
        for pool in ("ThreadPool", "InlinePool"):
            monkeypatch.setattr(module, pool, part(pool))
        monkeypatch.setattr(process_pool, "ProcessPool", part("ProcessPool"))
        monkeypatch.setattr(module, "Dispatcher", part("dispatcher"))
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
    assert given.ring == (depth + SPARE_SLOTS, 2 if method == "multiprocessing" else 0, False)
    assert given.dispatcher[0] == ("ProcessPool" if method == "multiprocessing" else "ThreadPool")


def test_without_workers_the_caller_reads_nothing_ahead_and_there_are_no_slots(built, caplog):
    given = built(num_workers=0, seed=0)
    assert (given.dispatcher[0], given.dispatcher[2](1)) == ("InlinePool", 0)
    assert given.ring[:2] == (0, 0)
    assert not caplog.messages


def test_a_system_without_worker_processes_reads_inline_and_says_so(built, monkeypatch, caplog):
    monkeypatch.setattr(worker_loader, "HAS_PROCESSES", False)
    module.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="loaders"):
        assert built(num_workers=1, seed=0).dispatcher[0] == "InlinePool"
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
    assert (given[1], given[4:]) == (2, (print, 7, 4, 2))
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


# Epochs


class Engine:
    """Delivers its tasks' indices at once."""

    stats = None

    def __init__(self) -> None:
        self.processes, self.calls = ["a process"], []
        self.is_interrupted, self.deliveries, self.tasks = False, 0, iter(())

    def begin(self, tasks) -> None:
        self.tasks, self.deliveries = iter(tasks), 0
        self.calls.append("begin")

    def next(self, epoch: int | None = None) -> Delivery | None:
        task = self.peek()
        if task is None or task.epoch != epoch:
            return None
        next(self.tasks)
        self.deliveries += 1
        if 3 in task.indices:
            return Delivery(task.number, error=ValueError("3 is bad"))
        return Delivery(task.number, list(task.indices))

    def continues_with(self, epoch: int, first: int) -> bool:
        task = self.peek()
        if task is None or (task.epoch, task.number) != (epoch, first):
            return False
        self.deliveries = 0
        return True

    def peek(self):
        """The next task, which stays the next one."""
        for task in self.tasks:
            self.tasks = chain([task], self.tasks)
            return task
        return None

    def check_process(self) -> None:
        self.calls.append("check")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def engines(monkeypatch):
    """The engines that are built, each with the base seed that it was given."""
    made: list[Engine] = []

    def build(loader, base_seed) -> Engine:
        made.append(Engine())
        made[-1].base_seed = base_seed
        return made[-1]

    monkeypatch.setattr(worker_loader, "build_engine", build)
    return made


def seeded(length: int = 4, **settings) -> WorkerLoader:
    return WorkerLoader(Numbers(length), 2, seed=0, **settings)


def outcomes(iterator) -> list:
    found: list = []
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except ValueError:
            found.append("an error")


def test_a_persistent_pool_is_one_engine_that_loads_the_next_epoch_ahead(engines):
    loader = seeded(3, num_workers=1, persistent_workers=True)
    assert [outcomes(iter(loader)) for _ in range(2)] == [[[0, 1], [2]]] * 2
    (engine,) = engines
    assert engine.calls == ["begin", "check"], "the second epoch was begun by the first"
    loader.set_epoch(7)
    assert outcomes(iter(loader)) == [[0, 1], [2]]
    assert engine.calls == ["begin", "check", "check", "begin"]
    loader.close()
    assert engine.calls[-1] == "close"


@pytest.mark.parametrize(
    "settings",
    [{"num_workers": 0, "persistent_workers": True}, {"num_workers": 1, "persistent_workers": False}],
)
def test_without_a_pool_that_persists_each_epoch_has_its_engine_and_closes_it(engines, settings):
    loader = seeded(3, **settings)
    assert [outcomes(iter(loader)) for _ in range(2)] == [[[0, 1], [2]]] * 2
    assert [engine.calls for engine in engines] == [["begin", "close"]] * 2
    assert [next(engine.tasks, None) for engine in engines] == [None, None], "nothing is loaded ahead"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_newer_epoch_ends_the_older_where_workers_persist(engines, num_workers, persistent):
    loader = seeded(8, num_workers=num_workers, persistent_workers=persistent)
    older, newer = iter(loader), iter(loader)
    assert next(newer) == [0, 1]
    if persistent:
        with pytest.raises(RuntimeError):
            next(older)
    else:
        assert next(older) == [0, 1]
    loader.close()


@pytest.mark.parametrize("settings", [{"sampler": range(3)}, {"in_order": False}])
def test_a_users_sampler_and_batches_out_of_order_are_not_loaded_ahead(engines, settings):
    loader = seeded(3, num_workers=1, persistent_workers=True, **settings)
    assert [outcomes(iter(loader)) for _ in range(2)] == [[[0, 1], [2]]] * 2
    (engine,) = engines
    assert engine.calls == ["begin", "check", "begin"]
    assert next(engine.tasks, None) is None
    loader.close()


def test_an_engine_that_was_interrupted_is_replaced_before_the_next_epoch(engines):
    loader = seeded(3, num_workers=1, persistent_workers=True)
    list(loader)
    engines[0].is_interrupted = True
    assert list(loader) == [[0, 1], [2]]
    assert [engine.calls for engine in engines] == [["begin", "check", "close"], ["begin"]]
    loader.close()


@pytest.mark.parametrize("how", ["interrupted", "lost a batch"])
@pytest.mark.parametrize("persistent", [True, False])
def test_an_interrupted_epoch_goes_on_after_the_last_batch_that_was_received(engines, how, persistent):
    loader = seeded(8, num_workers=1, persistent_workers=persistent)
    iterator = iter(loader)
    assert next(iterator) == [0, 1]
    if how == "interrupted":
        engines[0].is_interrupted = True
    else:
        engines[0].next(0)  # nobody receives it
    assert outcomes(islice(iterator, 2)) == ["an error"]
    assert iterator._workers == ["a process"]
    assert outcomes(iterator) == [[4, 5], [6, 7]]
    reused = persistent and how == "lost a batch"
    assert len(engines) == (1 if reused else 2)
    assert "close" in engines[0].calls or reused
    loader.close()


def test_out_of_order_an_interrupted_epoch_cannot_go_on(engines):
    loader = seeded(8, num_workers=1, in_order=False)
    iterator = iter(loader)
    next(iterator)
    engines[0].is_interrupted = True
    with pytest.raises(RuntimeError) as refused:
        next(iterator)
    assert str(refused.value) == INTERRUPTED
    assert engines[0].calls == ["begin", "close"]


@pytest.mark.parametrize("given", [{}, {"sampler": list(range(8))}])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_new_length_restarts_workers_that_have_a_copy_of_the_dataset(engines, given, persistent, caplog):
    dataset, loader_settings = Numbers(4), {"num_workers": 1, "persistent_workers": persistent, **given}
    loader = WorkerLoader(dataset, 2, seed=0, **loader_settings)
    list(islice(iter(loader), 1))
    dataset.length = 6
    with caplog.at_level(logging.WARNING, logger="loaders"):
        assert len(loader) == (4 if given else 3)
        iter(loader)
    closed = not given and persistent
    assert bool(caplog.messages) == (not given)
    if not given:
        assert "Numbers had 4 samples and has 6 now" in caplog.text
    assert (len(engines) == 2 and "close" in engines[0].calls) or not closed
    assert len(loader.sampler) == (8 if given else 6)
    loader.close()


def test_a_state_of_a_dataset_that_has_grown_meanwhile_is_taken(engines):
    dataset = Numbers(4)
    loader = WorkerLoader(dataset, 2, seed=0)
    state = {**loader.state_dict(), "dataset_length": 8, "samples": 6}
    dataset.length = 8
    loader.load_state_dict(state)
    assert list(loader) == [[6, 7]]


class Understated(list):
    """Says that it has half of its indices."""

    def __len__(self) -> int:
        return super().__len__() // 2


def test_a_sampler_that_gives_more_than_its_length_runs_until_its_end(engines):
    loader = WorkerLoader(Numbers(12), 2, seed=0, num_workers=1, sampler=Understated([4, 5, 6, 7, 8, 9, 10, 11]))

    def place() -> tuple[int, int]:
        state = loader.state_dict()
        return state["epoch"], state["samples"]

    assert place() == (0, 0)
    places = [place() for _ in iter(loader)]
    assert places == [(0, 2), (0, 4), (0, 4), (0, 4)]  # its length is the most that a state can tell
    assert place() == (1, 0)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "samples": 2})
    assert place() == (3, 2)
    assert not loader._runner.is_running


def test_a_sampler_that_gives_its_length_is_at_its_end_after_its_last_batch(engines):
    loader = WorkerLoader(Numbers(8), 2, seed=0, num_workers=1, sampler=[4, 5, 6, 7])
    iterator = iter(loader)
    for place in ((0, 2), (1, 0)):
        next(iterator)
        state = loader.state_dict()
        assert (state["epoch"], state["samples"]) == place


def test_a_runner_that_is_copied_has_no_engine_and_tasks_of_its_own(engines):
    loader = seeded(4, num_workers=1, persistent_workers=True)
    next(iter(loader))
    runner = loader._runner.__getstate__()
    assert runner["engine"] is None
    assert runner["tasks"] is not loader._runner.tasks
    loader.close()


# torch's way


def test_torchs_iterator_delivers_all_and_closes_its_engine(engines):
    iterator = iter(WorkerLoader(Numbers(6), 2, num_workers=1))
    assert iterator._workers == ["a process"]
    assert outcomes(iterator) == [[0, 1], "an error", [4, 5]]
    assert iterator._num_yielded == 2
    assert not iterator.is_running
    assert engines[0].calls[-1] == "close"
    assert engines[0].base_seed == iterator._base_seed


def test_torchs_persistent_iterator_keeps_its_engine(engines):
    loader = WorkerLoader(Numbers(6), 2, num_workers=1, persistent_workers=True)
    for _ in range(2):
        iterator = iter(loader)
        assert iterator.is_running
        assert outcomes(iterator) == [[0, 1], "an error", [4, 5]]
    (engine,) = engines
    assert engine.calls == ["check", "begin"] * 2
    engine.is_interrupted = True
    assert outcomes(iter(loader)) == [[0, 1], "an error", [4, 5]]
    assert len(engines) == 2
    assert engine.calls[-1] == "close"
    loader.close()
    assert engines[1].calls[-1] == "close"
    with pytest.raises(RuntimeError, match="this WorkerLoader is closed"):
        next(iterator)


def test_torchs_iterator_notices_a_batch_that_an_exception_lost(engines):
    iterator = iter(WorkerLoader(Numbers(8), 2, num_workers=1))
    assert next(iterator) == [0, 1]
    engines[0].next()
    with pytest.raises(RuntimeError) as missed:
        next(iterator)
    assert str(missed.value) == INTERRUPTED


@pytest.mark.parametrize("seed", [None, 0])
def test_only_batches_are_pinned_and_errors_come_out_as_they_are(engines, monkeypatch, seed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "pin_memory", lambda batch: ("pinned", list(batch)))
    loader = WorkerLoader(Numbers(4), 2, num_workers=1, seed=seed, pin_memory=True)
    assert outcomes(iter(loader)) == [("pinned", [0, 1]), "an error"]
    loader.holds_batches_until_copied = True
    assert outcomes(iter(loader)) == [[0, 1], "an error"]


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(("pin_memory", "has_cuda"), [(False, True), (True, False)])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_nothing_is_pinned_that_was_not_asked_for_or_without_a_gpu(engines, monkeypatch, seed, pin_memory, has_cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(module, "pin_memory", lambda batch: pytest.fail("it was pinned"))
    loader = WorkerLoader(Numbers(3), 2, num_workers=1, seed=seed, pin_memory=pin_memory)
    assert outcomes(iter(loader)) == [[0, 1], [2]]


@pytest.mark.parametrize("seed", [None, 0])
def test_the_figures_are_those_of_the_newest_engine_until_the_loader_is_closed(engines, monkeypatch, seed):
    monkeypatch.setattr(Engine, "stats", SimpleNamespace(as_dict=lambda: {"batches": 2}), raising=False)
    loader = WorkerLoader(Numbers(3), 2, num_workers=1, seed=seed)
    assert loader.stats() == {}
    list(loader)
    assert loader.stats() == {"workers": {"batches": 2}}
    loader.close()
    assert loader.stats() == {}
