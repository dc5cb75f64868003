"""Which iterator next(loader) continues, who reads iterable datasets, and lengths that are not known."""

import gc
import logging
import weakref

import pytest
from example_datasets import Numbers
from torch.utils.data import DataLoader, IterableDataset

from loaders import WorkerLoader
from loaders.workers import engine
from loaders.workers.engine import warn_once


class Endless:
    """A sampler without a length."""

    def __iter__(self):
        return iter(range(4))


def test_next_continues_the_newest_iterator():
    with WorkerLoader(Numbers(6), 2, seed=0) as loader:
        assert next(loader).tolist() == [0, 1]
        iterator = iter(loader)
        assert next(loader).tolist() == [0, 1]
        assert next(iterator).tolist() == [2, 3]
        assert next(loader).tolist() == [4, 5]
        with pytest.raises(StopIteration):
            next(loader)
        assert next(loader).tolist() == [0, 1], "a new one"


def test_next_begins_an_iterator_where_the_newest_is_gone():
    with WorkerLoader(Numbers(6), 2, seed=0) as loader:
        next(iter(loader))
        assert next(loader).tolist() == [0, 1]
        assert next(loader).tolist() == [2, 3]


def test_a_sampler_without_a_length_leaves_its_loader_without_one():
    loader = WorkerLoader(Numbers(4), 2, seed=0, sampler=Endless())
    with pytest.raises(TypeError, match="the sampler has no length, so the loader has none either"):
        len(loader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_torchs_own_workers_serve_systems_without_our_processes(monkeypatch, caplog):
    monkeypatch.setattr(engine, "HAS_PROCESSES", False)
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda loader: (batch for batch in ["torch's"]))
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="loaders"):
        assert [batch.tolist() for batch in WorkerLoader(Stream(), 2)] == [[0, 1], [2, 3]]
        for settings in ({}, {"num_workers": 1, "worker_method": "thread"}):
            with WorkerLoader(Numbers(4), 2, **settings) as loader:
                assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        assert not caplog.messages
        assert list(WorkerLoader(Numbers(4), 2, num_workers=1)) == ["torch's"]
    (said,) = caplog.messages
    assert said.startswith("torch's own workers read on systems other than Linux")


def test_a_closed_loader_keeps_no_persistent_iterator():
    loader = WorkerLoader(Numbers(4), 2, num_workers=1, persistent_workers=True, worker_method="thread")
    iterator = weakref.ref(iter(loader))
    loader.close()
    gc.collect()
    assert iterator() is None


def test_torchs_warning_of_too_many_workers_comes_when_an_iterator_is_made(monkeypatch):
    with WorkerLoader(Numbers(4), 2, num_workers=1, worker_method="thread") as loader:
        checked: list = []
        monkeypatch.setattr(loader, "check_worker_number_rationality", lambda: checked.append(loader))
        iter(loader)
        assert checked == [loader]
