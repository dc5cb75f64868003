"""What a program that had a DataLoader meets: methods that are not there, arguments that torch takes, one sentence."""

import copy
import json
import logging
import multiprocessing
import pickle
import re
from functools import partialmethod
from pickle import PicklingError

import numpy as np
import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import DataLoader, IterableDataset, dataloader, get_worker_info
from torch.utils.data._utils import fetch

from loaders import Preloader, ResidentLoader, TorchLoader, WorkerLoader
from loaders.workers import engine

LENGTH, BATCH_SIZE = 24, 4


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(range(6))


# Without a seed


OF_SEEDS = ["set_epoch", "state_dict", "load_state_dict"]


def over(kind: type, depth: int, seed: dict):
    return lambda: Preloader(kind(Numbers(LENGTH), BATCH_SIZE, **seed), "cpu", depth)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: WorkerLoader(Numbers(LENGTH), BATCH_SIZE), []),
        (lambda: WorkerLoader(Stream(), BATCH_SIZE), []),
        (lambda: WorkerLoader(Numbers(LENGTH), BATCH_SIZE, seed=0), OF_SEEDS),
        *[(over(WorkerLoader, depth, {"seed": 0}), OF_SEEDS) for depth in (0, 2)],
        *[(over(kind, depth, {}), ["set_epoch"]) for kind in (WorkerLoader, DataLoader) for depth in (0, 2)],
    ],
)
def test_only_a_loader_with_a_seed_has_set_epoch_and_a_state(make, expected):
    loader = make()
    for _ in range(2):
        assert [name for name in OF_SEEDS if hasattr(loader, name)] == expected
        assert list(loader)
    getattr(loader, "close", lambda: None)()


@pytest.mark.parametrize("depth", [0, 2])
def test_set_epoch_of_a_preloader_without_a_sampler_to_tell_does_no_harm(depth):
    with Preloader(WorkerLoader(Numbers(LENGTH), BATCH_SIZE), "cpu", depth) as preloader:
        preloader.set_epoch(3)
        assert torch.cat(list(preloader)).tolist() == list(range(LENGTH))


# Arguments


@pytest.mark.parametrize("kind", [WorkerLoader, TorchLoader, ResidentLoader])
def test_seeds_and_epochs_may_be_numpys(kind):
    with kind(Numbers(LENGTH), BATCH_SIZE, shuffle=True, seed=np.uint64(3)) as loader:
        loader.set_epoch(np.int64(2))
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["seed"], state["epoch"]) == (3, 2)
        with kind(Numbers(LENGTH), BATCH_SIZE, shuffle=True, seed=3) as other:
            other.load_state_dict(state)
            assert contents(loader) == contents(other)


class WithTransform(Numbers):
    """A process that starts can get its lock, but not the lambda that will be its transform."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.lock, self.transform = multiprocessing.get_context("spawn").Lock(), None


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("what", [r"dataset\.transform", "worker_init_fn"])
def test_what_cannot_be_pickled_for_spawned_workers_is_named(what, seed):
    dataset, settings = WithTransform(4), {}
    if what == "worker_init_fn":
        settings = {what: lambda worker: None}
    else:
        dataset.transform = lambda image: image
    loader = WorkerLoader(dataset, num_workers=1, seed=seed, multiprocessing_context="spawn", **settings)
    with loader, pytest.raises((AttributeError, PicklingError), match=rf"{what} \(.*lambda.*cannot be pickled"):
        iter(loader)
    assert multiprocessing.active_children() == []


# torch's own workers, and its warnings


def test_torchs_own_iterator_serves_where_worker_processes_are_not_ours_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(engine, "HAS_PROCESSES", False)
    monkeypatch.setattr(dataloader, "_MultiProcessingDataLoaderIter", lambda loader: iter(["torch's"]))
    engine.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="loaders"):
        for settings in ({}, {"num_workers": 1, "worker_method": "thread"}):
            with WorkerLoader(Numbers(4), 2, **settings) as loader:
                assert contents(loader) == [[0, 1], [2, 3]]
        assert not caplog.messages
        for _ in range(2):
            assert list(WorkerLoader(Numbers(4), 2, num_workers=1)) == ["torch's"]
    (said,) = caplog.messages
    assert said.startswith("torch's own workers read on systems other than Linux")


class OwnFetcher(fetch._MapDatasetFetcher):
    """Reads batches of batches: sequences that are packed into one row."""

    def fetch(self, possibly_batched_index):
        return super().fetch([index for indices in possibly_batched_index for index in indices])


def marked(function):
    return lambda *args: ("marked", function(*args))


REPLACED = {
    "__next__": (dataloader._BaseDataLoaderIter, marked(dataloader._BaseDataLoaderIter.__next__)),
    "fetch": (fetch._MapDatasetFetcher, marked(fetch._MapDatasetFetcher.fetch)),
    "create_fetcher": (dataloader._DatasetKind, staticmethod(lambda _, *args: OwnFetcher(*args))),
    "_MapDatasetFetcher": (fetch, OwnFetcher),
    "_get_iterator": (DataLoader, lambda loader: iter([("marked", torch.tensor([0, 1, 2]))])),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", REPLACED)
def test_a_program_may_replace_a_part_of_torchs_loader(name, num_workers, monkeypatch, caplog):
    def batches(kind) -> list:
        return list(map(str, kind(Numbers(4), batch_sampler=batch_sampler, num_workers=num_workers)))

    is_packed = REPLACED[name][1] is OwnFetcher or name == "create_fetcher"
    batch_sampler = [[[0], [1, 2]], [[3]]] if is_packed else [[0, 1, 2], [3]]
    monkeypatch.setattr(REPLACED[name][0], name, REPLACED[name][1])
    assert batches(WorkerLoader) == batches(DataLoader)
    assert ("tensor([0, 1, 2])" if is_packed else "('marked', tensor([0, 1, 2]))") in batches(WorkerLoader)
    engine.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="loaders"), WorkerLoader(Numbers(4), 2, seed=0) as loader:
        assert contents(loader) == [[0, 1], [2, 3]]
    assert "leave out the seed" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_is_one_of_torchs(num_workers):
    def classes(kind) -> list[bool]:
        iterator = iter(kind(Numbers(4), 2, num_workers=num_workers))
        torchs = dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter
        return [isinstance(iterator, one) for one in (*torchs, dataloader._BaseDataLoaderIter)]

    assert classes(WorkerLoader) == classes(DataLoader) == [not num_workers, bool(num_workers), True]


def test_a_program_may_add_arguments_that_were_not_given(monkeypatch):
    added = partialmethod(DataLoader.__init__, num_workers=1, persistent_workers=True, prefetch_factor=3)
    monkeypatch.setattr(DataLoader, "__init__", added)
    with WorkerLoader(Numbers(4), 2) as loader:
        assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (1, True, 3)
        assert contents(loader) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_program_can_ask_whether_an_iterators_workers_have_ended(persistent):
    def seen(kind) -> list:
        loader = kind(Numbers(4), 2, num_workers=1, persistent_workers=persistent)
        states = []
        for _ in range(2):
            iterator = iter(loader)
            states += [iterator._shutdown, len(list(iterator)), iterator._shutdown]
            iterator._shutdown_workers()
            states.append(iterator._shutdown)
            loader._iterator = None
        return states

    assert seen(WorkerLoader) == seen(DataLoader) == 2 * [False, 2, not persistent, True]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_subclass_may_override_the_hooks_of_torchs_class(num_workers):
    def batches(kind) -> list:
        class Own(kind):
            _auto_collation = False

            def _get_iterator(self):
                return map(str, super()._get_iterator())  # which no weak reference can refer to

        return list(Own(Numbers(4), 2, num_workers=num_workers))

    assert batches(WorkerLoader) == batches(DataLoader) == ["0", "1", "2", "3"]


class Shares(IterableDataset):
    """Worker i of 3 gives 4 * i samples. It says how many all give, or another number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        return iter(range(4 * get_worker_info().id))


@pytest.mark.parametrize("length", [12, 10])
def test_torchs_warning_of_more_samples_than_a_streams_len_comes_only_then(length, recwarn):
    def warned(kind) -> list[str]:
        recwarn.clear()
        loader = kind(Shares(length), batch_size=None, num_workers=3)
        assert len(loader) == length and len(list(loader)) == 12
        return re.findall(r"but \d+ samples have been fetched", " ".join(str(one.message) for one in recwarn))

    assert warned(WorkerLoader) == warned(DataLoader)
    assert len(warned(WorkerLoader)) == 12 - length


def test_torchs_warning_of_too_many_workers_comes_when_an_iterator_is_made(monkeypatch):
    with WorkerLoader(Numbers(4), 2, num_workers=1, worker_method="thread") as loader:
        checked: list = []
        monkeypatch.setattr(loader, "check_worker_number_rationality", lambda: checked.append(loader))
        iter(loader)
        assert checked == [loader]


@pytest.mark.parametrize("seed", [None, 0])
def test_a_program_may_put_our_class_in_the_place_of_torchs(seed, monkeypatch, caplog):
    for module in (torch.utils.data, dataloader):
        monkeypatch.setattr(module, "DataLoader", WorkerLoader)
    engine.warn_once.cache_clear()
    with WorkerLoader(Numbers(4), 2, seed=seed) as loader:
        assert type(iter(loader)).__module__.startswith("loaders.")
    assert not caplog.messages


class Scaling(WorkerLoader):
    """Its collate_fn is one of its methods."""

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, collate_fn=self.scaled, **settings)

    def scaled(self, samples: list) -> torch.Tensor:
        return 10 * torch.tensor(samples)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("seed", [None, 0])
def test_a_loader_whose_collate_fn_is_its_method_can_be_copied_and_pickled(seed, way):
    with way(Scaling(Numbers(4), 2, seed=seed)) as loader:
        assert contents(loader) == [[0, 10], [20, 30]]


@pytest.mark.parametrize("seed", [None, 0])
def test_spawned_workers_may_use_a_collate_fn_that_is_a_method_of_the_loader(seed):
    with Scaling(Numbers(4), 2, num_workers=1, multiprocessing_context="spawn", seed=seed) as loader:
        assert contents(loader) == [[0, 10], [20, 30]]
