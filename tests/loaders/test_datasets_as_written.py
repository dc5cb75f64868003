"""What a dataset's own methods do counts: an override is called, StopIteration is an error, __getitems__ is enough."""

import random

import numpy as np
import pytest
import torch
from example_datasets import Numbers, contents, outcomes

from loaders import ResidentLoader, TorchLoader, WorkerLoader

LENGTH, BATCH_SIZE = 12, 4


# Which methods count


class Written(Numbers):
    """Sample i is i, through each method that a dataset may have."""

    def __getitem__(self, index: int) -> dict:
        return {"number": torch.tensor(index)}

    def sample_spec(self) -> dict:
        return {"number": ((), torch.int64)}

    def read_batch(self, indices, out, random) -> None:
        out["number"].copy_(torch.from_numpy(indices))

    def arrays(self) -> dict:
        return {"number": np.arange(self.length)}

    def augment_batch(self, batch: dict, random) -> dict:
        return {"number": batch["number"]}


class Tripled(Written):
    """A forker's first edit."""

    def __getitem__(self, index: int) -> dict:
        return {"number": 3 * super().__getitem__(index)["number"]}


class Wrapper:
    """Gives another dataset's samples three times as large, and all else as that has it."""

    def __init__(self, dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        return {"number": 3 * self.dataset[index]["number"]}

    def __getattr__(self, name: str):
        if name == "dataset":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class OnTheInstance(Numbers):
    """Has the other methods as attributes of the object alone."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        written = Written(length)
        self.sample_spec, self.read_batch, self.arrays = written.sample_spec, written.read_batch, written.arrays

    def __getitem__(self, index: int) -> dict:
        return {"number": torch.tensor(3 * index)}


class WrittenAnew(Tripled):
    """Brings the faster methods up to date with what it inherits."""

    def __getitem__(self, index: int):
        raise AssertionError("read_batch and arrays are there")

    def read_batch(self, indices, out, random) -> None:
        out["number"].copy_(torch.from_numpy(7 * indices))

    def arrays(self) -> dict:
        return {"number": 7 * np.arange(self.length)}


KINDS = {
    "a subclass": (Tripled, 3),
    "a wrapper": (lambda length: Wrapper(Written(length)), 3),
    "attributes of the object": (OnTheInstance, 3),
    "faster methods beside": (WrittenAnew, 7),
}


@pytest.mark.parametrize(("kind", "factor"), KINDS.values(), ids=KINDS)
def test_faster_methods_count_only_beside_the_getitem_that_is_in_force(kind, factor, reader):
    expected = [factor * index for index in range(LENGTH)]
    with WorkerLoader(kind(LENGTH), BATCH_SIZE, seed=0, **reader) as loader:
        assert torch.cat([batch["number"] for batch in loader]).tolist() == expected
    with ResidentLoader(kind(LENGTH), BATCH_SIZE) as loader:
        assert torch.cat([batch["number"] for batch in loader]).tolist() == expected


@pytest.mark.parametrize("spec", [{"number": 3}, {"number": ((), "int64")}, []])
def test_a_sample_spec_that_is_no_spec_is_refused_with_what_it_returned(spec):
    class Odd(WrittenAnew):
        def sample_spec(self):
            return spec

    with pytest.raises(ValueError, match="sample_spec") as refusal:
        list(WorkerLoader(Odd(4), 2, seed=0))
    assert repr(spec) in str(refusal.value)


class Replaced(Written):
    def __getitem__(self, index: int):
        return index

    def read_batch(self, indices, out, random) -> None:
        out["number"] = torch.from_numpy(indices)


class Half(Written):
    """Forgets the second half of its rows."""

    def __getitem__(self, index: int):
        return index

    def read_batch(self, indices, out, random) -> None:
        out["number"][: len(indices) // 2] = 0


def test_read_batch_that_replaces_a_tensor_is_named_and_rows_that_it_forgets_are_under_debug(reader, monkeypatch):
    with WorkerLoader(Replaced(4), 2, seed=0, **reader) as loader:
        assert "number" in outcomes(loader)[0]
    monkeypatch.setenv("LOADERS_DEBUG", "1")
    with WorkerLoader(Half(4), 4, seed=0, **reader) as loader:
        (said,) = outcomes(loader)
        assert "number" in said and "2" in said


# StopIteration


def stop() -> None:
    next(iter(()))


class StopsInItem(Numbers):
    """Reading one of the middle batch's samples raises StopIteration."""

    def __getitem__(self, index: int) -> int:
        return stop() if index == 5 else index


class StopsInBatch(Numbers):
    def sample_spec(self) -> dict:
        return {"number": ((), torch.int64)}

    def read_batch(self, indices, out, random) -> None:
        if 5 in indices:
            stop()
        out["number"].copy_(torch.from_numpy(indices))


def stops_in_collate(samples: list) -> torch.Tensor:
    return stop() if 5 in samples else torch.tensor(samples)


def stops_in_augment(batch: torch.Tensor, random) -> torch.Tensor:
    return stop() if 5 in batch else batch


WAYS = {
    "an item": (StopsInItem, {}),
    "a batch": (StopsInBatch, {}),
    "collating": (Numbers, {"collate_fn": stops_in_collate}),
}


@pytest.mark.parametrize(("kind", "settings"), WAYS.values(), ids=WAYS)
def test_stop_iteration_is_the_error_of_its_batch_and_never_the_end_of_the_epoch(kind, settings, reader):
    with WorkerLoader(kind(LENGTH), BATCH_SIZE, seed=0, persistent_workers=True, **settings, **reader) as loader:
        for _ in range(2):
            first, error, last = outcomes(loader)
            assert "StopIteration" in error and first in ([0, 1, 2, 3], {"number": [0, 1, 2, 3]})
            assert last in ([8, 9, 10, 11], {"number": [8, 9, 10, 11]})


def test_stop_iteration_is_an_error_of_the_stock_loader_and_of_a_set_that_is_read_once():
    for settings in ({}, {"num_workers": 2}):
        with TorchLoader(StopsInItem(LENGTH), BATCH_SIZE, seed=0, **settings) as loader:
            iterator = iter(loader)
            assert next(iterator).tolist() == [0, 1, 2, 3]
            with pytest.raises(RuntimeError, match=r"stopped|StopIteration"):
                next(iterator)
    with ResidentLoader(Numbers(LENGTH), BATCH_SIZE, augment=stops_in_augment) as loader:
        assert "StopIteration" in outcomes(loader)[1]
    with ResidentLoader(StopsInItem(LENGTH), BATCH_SIZE) as loader, pytest.raises(RuntimeError, match="StopIteration"):
        iter(loader)


# Datasets with __getitems__ only


class Together:
    """Samples that can be had several at a time only, with a draw from each global generator."""

    def __len__(self) -> int:
        return LENGTH

    def __getitems__(self, indices) -> list:
        return [[index, random.random(), np.random.random(), torch.rand(()).item()] for index in indices]


@pytest.mark.parametrize("seed", [None, 0])
def test_getitems_alone_is_enough(seed, reader):
    with WorkerLoader(Together(), BATCH_SIZE, seed=seed, **reader) as loader:
        assert contents(batch[0] for batch in loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
