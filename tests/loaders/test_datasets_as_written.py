"""What a dataset's own methods do counts: an override is called, StopIteration is an error, __getitems__ is enough."""

import random

import numpy as np
import pytest
import torch
from example_datasets import Numbers, contents

from loaders import ResidentLoader, TorchLoader, WorkerLoader

LENGTH, BATCH_SIZE = 12, 4


def batches(dataset, **settings) -> list:
    """An epoch in the dataset's order."""
    with WorkerLoader(dataset, BATCH_SIZE, **{"seed": 0, "persistent_workers": True, **settings}) as loader:
        return list(loader)


def numbers(dataset, reader: dict) -> list[int]:
    return torch.cat([batch["number"] for batch in batches(dataset, **reader)]).tolist()


# Which methods count


class Written(Numbers):
    """Sample i is i, through each method that a dataset may have."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)

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

    def __init__(self) -> None:
        super().__init__(LENGTH)
        written = Written()
        self.sample_spec, self.read_batch, self.arrays = written.sample_spec, written.read_batch, written.arrays

    def __getitem__(self, index: int) -> dict:
        return {"number": torch.tensor(3 * index)}


OVERRIDDEN = {
    "a subclass": Tripled,
    "a wrapper": lambda: Wrapper(Written()),
    "attributes of the object": OnTheInstance,
}


@pytest.fixture(params=OVERRIDDEN.values(), ids=OVERRIDDEN)
def overridden(request):
    return request.param()


def test_a_getitem_that_overrides_arrays_and_read_batch_is_what_is_read(overridden, reader):
    assert numbers(overridden, reader) == [3 * index for index in range(LENGTH)]
    with ResidentLoader(overridden, BATCH_SIZE) as loader:
        assert torch.cat([batch["number"] for batch in loader]).tolist() == [3 * index for index in range(LENGTH)]


class WrittenAnew(Tripled):
    """Brings the faster methods up to date with what it inherits."""

    def __getitem__(self, index: int):
        raise AssertionError("read_batch and arrays are there")

    def read_batch(self, indices, out, random) -> None:
        out["number"].copy_(torch.from_numpy(7 * indices))

    def arrays(self) -> dict:
        return {"number": 7 * np.arange(self.length)}


def test_faster_methods_beside_the_getitem_are_used(reader):
    assert numbers(WrittenAnew(), reader) == [7 * index for index in range(LENGTH)]
    with ResidentLoader(WrittenAnew(), BATCH_SIZE) as loader:
        assert torch.cat([batch["number"] for batch in loader]).tolist() == [7 * index for index in range(LENGTH)]


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


def numbers_of(batch) -> list[int]:
    return (batch["number"] if isinstance(batch, dict) else batch).tolist()


def assert_only_the_middle_batch_fails(loader) -> None:
    iterator = iter(loader)
    assert numbers_of(next(iterator)) == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)
    assert numbers_of(next(iterator)) == [8, 9, 10, 11]
    with pytest.raises(StopIteration):
        next(iterator)


def test_stop_iteration_in_read_batch_is_the_error_of_its_batch_and_the_epoch_goes_on(reader):
    with WorkerLoader(StopsInBatch(LENGTH), BATCH_SIZE, seed=0, persistent_workers=True, **reader) as loader:
        for _ in range(2):
            assert_only_the_middle_batch_fails(loader)


def stops_in_collate(samples: list) -> torch.Tensor:
    return stop() if 5 in samples else torch.tensor(samples)


def stops_in_augment(batch: torch.Tensor, random) -> torch.Tensor:
    return stop() if 5 in batch else batch


def test_stop_iteration_is_an_error_of_the_stock_loader_and_of_a_set_that_is_read_once():
    for num_workers, reading in ((0, {}), (2, {}), (0, {"collate_fn": stops_in_collate})):
        kind = Numbers if reading else StopsInItem
        with TorchLoader(kind(LENGTH), BATCH_SIZE, num_workers=num_workers, **reading) as loader:
            assert_only_the_middle_batch_fails(loader)
    with ResidentLoader(Numbers(LENGTH), BATCH_SIZE, augment=stops_in_augment) as loader:
        assert_only_the_middle_batch_fails(loader)
    for kind in (StopsInItem, StopsInBatch):
        with ResidentLoader(kind(LENGTH), BATCH_SIZE) as loader, pytest.raises(RuntimeError, match="StopIteration"):
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
    read = batches(Together(), seed=seed, **{**reader, "persistent_workers": False})
    assert contents(batch[0] for batch in read) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
