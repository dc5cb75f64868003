"""A sampler that gives an index outside of the dataset: a sentence with a seed, torch's own error without one."""

import pytest
import torch
from example_datasets import Written
from torch.utils.data import Subset

from loaders import WorkerLoader

DATASETS = {
    "list": list(range(5)),
    "Subset": Subset(range(100), range(5)),
    "TensorDataset": torch.utils.data.TensorDataset(torch.arange(5)),
    "Limited": type("Limited", (Written,), {"before": lambda self, index: [0, 0, 0, 0, 0][index]})(5),
}


@pytest.mark.parametrize(("kind", "index"), [*((kind, 5) for kind in DATASETS), ("list", -6)])
def test_an_index_outside_of_the_dataset_is_a_sentence(kind, index, reader):
    with WorkerLoader(DATASETS[kind], 2, sampler=[0, 1, 2, index], seed=0, **reader) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(IndexError, match=rf"{index}\b.*{kind}.*\b0 to 4"):
            next(batches)


class Modulo:
    """Takes indices that its length does not have."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == 12:
            raise KeyError("mine")
        return index % 5


def test_a_dataset_that_takes_other_indices_is_asked_for_them(reader):
    with WorkerLoader(Modulo(), 2, sampler=[7, 10**9], seed=0, **reader) as loader:
        assert next(iter(loader)).tolist() == [2, 0]
    with WorkerLoader({"a": 1, "b": 2}, 2, sampler=["a", "b", "c"], seed=0, **reader) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [1, 2]
        with pytest.raises(KeyError):
            next(batches)


def test_without_a_seed_the_error_is_the_datasets_as_under_torch():
    with pytest.raises(IndexError, match="list index out of range"):
        list(WorkerLoader(list(range(5)), 2, sampler=[0, 9], num_workers=1))
