"""loaders/workers/epochs.py: which engine runs an epoch, and what is loaded ahead."""

import logging
from itertools import chain, islice
from types import SimpleNamespace

import pytest
import torch
from example_datasets import Numbers

from loaders import WorkerLoader
from loaders.base import Delivery
from loaders.workers import dispatcher, epochs


class Engine:
    """Delivers its tasks' indices at once."""

    stats = None

    def __init__(self) -> None:
        self.processes, self.calls = ["a process"], []
        self.tasks, self.newest = iter(()), None

    def begin(self, tasks) -> None:
        self.tasks, self.newest = iter(tasks), None
        self.calls.append("begin")

    def next(self, epoch: int | None = None) -> Delivery | None:
        if self.newest is None or self.newest.is_taken:
            task, self.newest = self.peek(), None
            if task is not None and task.epoch == epoch:
                next(self.tasks)
                error = ValueError("3 is bad") if 3 in task.indices else None
                self.newest = Delivery(task.number, None if error else list(task.indices), error)
        return self.newest

    def continues_with(self, epoch: int, first: int) -> bool:
        task = self.peek()
        return task is not None and (task.epoch, task.number) == (epoch, first)

    def peek(self):
        """The next task, which stays the next one."""
        for task in self.tasks:
            self.tasks = chain([task], self.tasks)
            return task
        return None

    def use(self, timeline, pins: bool) -> None:
        """Records nothing."""

    def check_process(self) -> None:
        """Nothing was forked."""

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def engines(monkeypatch):
    """The engines that are built, each with the base seed that it was given."""
    made: list[Engine] = []

    def build(loader, base_seed=None) -> Engine:
        made.append(Engine())
        loader._added.stats = Engine.stats
        made[-1].base_seed = base_seed
        return made[-1]

    monkeypatch.setattr(epochs, "build_engine", build)
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
    assert engine.calls == ["begin"], "the second epoch was begun by the first"
    loader.set_epoch(7)
    assert outcomes(iter(loader)) == [[0, 1], [2]]
    assert engine.calls == ["begin", "begin"]
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


@pytest.mark.parametrize("settings", [{"sampler": range(3)}, {"in_order": False}])
def test_a_users_sampler_and_batches_out_of_order_are_not_loaded_ahead(engines, settings):
    loader = seeded(3, num_workers=1, persistent_workers=True, **settings)
    assert [outcomes(iter(loader)) for _ in range(2)] == [[[0, 1], [2]]] * 2
    (engine,) = engines
    assert engine.calls == ["begin", "begin"]
    assert next(engine.tasks, None) is None
    loader.close()


@pytest.mark.parametrize("seed", [None, 0])
def test_an_interrupted_next_loses_no_batch(engines, seed):
    iterator = iter(WorkerLoader(Numbers(8), 2, num_workers=1, seed=seed))
    assert next(iterator) == [0, 1]
    engine = engines[0]
    fetch = engine.next

    def interrupted(*given) -> None:
        fetch(*given)
        raise KeyboardInterrupt

    for _ in range(3):
        engine.next = interrupted
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        engine.next = fetch
        assert len(outcomes(islice(iterator, 1))) == 1
    assert outcomes(iterator) == []


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
    assert not loader._epochs.is_running


def test_a_sampler_that_gives_its_length_is_at_its_end_after_its_last_batch(engines):
    loader = WorkerLoader(Numbers(8), 2, seed=0, num_workers=1, sampler=[4, 5, 6, 7])
    iterator = iter(loader)
    for place in ((0, 2), (1, 0)):
        next(iterator)
        state = loader.state_dict()
        assert (state["epoch"], state["samples"]) == place


# torch's way


def test_torchs_iterator_delivers_all_and_closes_its_engine(engines):
    iterator = iter(WorkerLoader(Numbers(6), 2, num_workers=1))
    assert iterator._workers == ["a process"]
    assert outcomes(iterator) == [[0, 1], "an error", [4, 5]]
    assert iterator._num_yielded == 3  # the error counts
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
    assert engine.calls == ["begin"] * 2
    loader.close()
    assert engine.calls[-1] == "close"
    assert not iterator.is_running


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_batches_are_pinned_if_that_was_asked_for_where_there_is_a_gpu_and_the_consumer_does_not_hold_them(
    monkeypatch, seed
):
    monkeypatch.setattr(dispatcher, "pinned", lambda batch: "pinned")

    def pinned(has_gpu: bool = True, pin_memory: bool = True, holds: bool = False) -> list[bool]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        loader = WorkerLoader(Failing(), 2, seed=seed, pin_memory=pin_memory)
        loader.holds_batches_until_copied = holds
        return [outcome == "pinned" for outcome in outcomes(iter(loader))]

    assert pinned() == [True, False]
    assert pinned(pin_memory=False) == pinned(has_gpu=False) == pinned(holds=True) == [False, False]


class Failing(Numbers):
    """Its last sample cannot be read."""

    def __init__(self) -> None:
        super().__init__(4)

    def __getitem__(self, index: int):
        if index == 3:
            raise ValueError("3 is bad")
        return super().__getitem__(index)


@pytest.mark.parametrize("seed", [None, 0])
def test_the_figures_are_those_of_the_newest_engine_until_the_loader_is_closed(engines, monkeypatch, seed):
    monkeypatch.setattr(Engine, "stats", SimpleNamespace(as_dict=lambda: {"batches": 2}), raising=False)
    loader = WorkerLoader(Numbers(3), 2, num_workers=1, seed=seed)
    assert loader.stats() == {}
    list(loader)
    assert loader.stats() == {"workers": {"batches": 2}}
    loader.close()
    assert loader.stats() == {}
