"""A validation split, which reads as its dataset does."""

import copy
import pickle

import numpy as np
import pytest
import torch

from data.array_dataset import ArrayDataset
from data.subset import split, subset
from data.synthetic import Synthetic
from loaders import Random, ResidentLoader, WorkerLoader


def arrays(train: bool = True) -> ArrayDataset:
    images = np.random.default_rng(0).integers(0, 256, (50, 8, 8, 3), dtype=np.uint8)
    options = {"classes": "abc", "mean": [0.5] * 3, "std": [0.25] * 3, "pad": 2, "flip": True}
    return ArrayDataset(images, np.arange(50) % 3, train=train, **options)


def read(dataset, indices: list[int]) -> dict[str, torch.Tensor]:
    spec = dataset.sample_spec()
    out = {name: torch.empty((len(indices), *shape), dtype=dtype) for name, (shape, dtype) in spec.items()}
    dataset.read_batch(np.array(indices), out, Random(0, 0, np.arange(len(indices)), np.array(indices)))
    return out


def test_the_parts_of_a_split_have_each_sample_once_and_are_the_same_each_time():
    rest, part = split(Synthetic(train=True, length=100), 0.2)
    assert (len(rest), len(part)) == (80, 20)
    assert sorted([*rest.indices, *part.indices]) == list(range(100))
    assert np.array_equal(split(Synthetic(train=True, length=100), 0.2)[1].indices, part.indices)


def test_the_validation_part_is_not_augmented():
    _, part = split(arrays(), 0.2)
    plain = arrays(train=False)
    wanted = [int(index) for index in part.indices]
    assert torch.equal(read(part, list(range(10)))["image"], read(plain, wanted)["image"])
    assert torch.equal(part[3]["image"], plain[wanted[3]]["image"])


def test_a_subset_reads_whole_batches_and_arrays_only_if_its_dataset_does():
    some = subset(arrays(train=False), np.array([4, 7]))
    assert torch.equal(read(some, [1, 0])["label"], torch.tensor([7 % 3, 4 % 3]))
    assert np.array_equal(some.arrays()["label"], some.labels)
    plain = subset([10, 11, 12], np.array([2, 0]))
    assert [plain[0], plain[1], len(plain)] == [12, 10, 2]
    assert not hasattr(plain, "read_batch") and not hasattr(plain, "sample_spec")


def test_loaders_use_the_whole_batches_and_arrays_of_a_subset(caplog):
    dataset = subset(arrays(), np.arange(7, 27))
    for copied in (dataset, copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
        epochs = []
        for loader in (WorkerLoader(copied, 20, seed=0), ResidentLoader(copied, 20, seed=0)):
            with loader:
                first, second = [batch["image"] for _ in range(2) for batch in loader]
            assert not torch.equal(first, second)  # augmented afresh
            epochs.append(torch.stack([first, second]))
        assert torch.equal(*epochs)  # both draw by row, as read_batch does
    assert not caplog.records  # such as that it is read only once


def test_a_dataset_that_overrides_getitem_alone_is_not_read_in_whole_batches():
    class Dark(ArrayDataset):
        def __getitem__(self, index: int):
            return {"image": torch.zeros(8, 8, 3, dtype=torch.uint8), "label": torch.tensor(0)}

    dark = arrays()
    dark.__class__ = Dark
    with WorkerLoader(subset(dark, np.arange(4)), 4, seed=0) as loader:
        assert not next(loader)["image"].any()


@pytest.mark.parametrize(
    ("length", "fraction", "part"),
    [(2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 2), (3, 0.5, 2), (9, 0.99, 8), (9, 0.05, 1)],
)
def test_each_part_of_a_split_has_a_sample_and_the_fraction_is_rounded(length, fraction, part):
    rest, kept = split(list(range(length)), fraction)
    assert (len(rest), len(kept)) == (length - part, part)


def test_the_parts_are_the_same_on_every_machine():
    assert split(list(range(10)), 0.3)[1].indices.tolist() == [2, 4, 6]
