"""A validation split, which reads as its dataset does."""

import copy
import pickle

import numpy as np
import pytest
import torch

from data.array_dataset import ArrayDataset
from data.subset import Subset, split
from loaders import ResidentLoader, WorkerLoader, offers
from tests.data.reading import read_batch, refused


def arrays(train=True):
    images = np.random.default_rng(0).integers(0, 256, (50, 8, 8, 3), dtype=np.uint8)
    options = {"classes": "abc", "mean": [0.5] * 3, "std": [0.25] * 3, "pad": 2, "flip": True}
    return ArrayDataset(images, np.arange(50) % 3, train=train, **options)


def test_a_subset_reads_whole_batches_and_arrays_only_if_its_dataset_does_and_has_its_part_of_other_attributes():
    some = Subset(arrays(train=False), np.array([4, 7]))
    assert torch.equal(read_batch(some, [1, 0])["label"], torch.tensor([7 % 3, 4 % 3]))
    assert np.array_equal(some.arrays()["label"], some.labels)
    plain = Subset([10, 11, 12], np.array([2, 0]))
    assert [plain[0], plain[1], len(plain)] == [12, 10, 2]
    assert not offers(plain, "read_batch") and not offers(plain, "arrays")
    some.dataset.ids = np.arange(50)
    some.dataset.names = list(range(50))
    assert some.ids.tolist() == some.names == [4, 7] and some.classes == ("a", "b", "c")


class Offering:
    """A dataset with every optional method and attribute."""

    classes = np.array(["a", "b"])
    mean = torch.zeros(3)
    std = np.ones(3)

    def __init__(self):
        self.labels = pytest.importorskip("pandas").Series(np.arange(6) % 2)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return int(index)

    def path(self, index):
        return f"{index}.png"

    def prepare(self, image):
        return -image

    def will_read(self, indices):
        self.asked = indices.tolist()

    def without_augmentation(self):
        plain = Offering()
        plain.note = "plain"
        return plain

    def row_of(self, index):
        return index


def test_a_subset_has_every_optional_method_of_its_dataset_for_its_samples_and_names_the_others():
    nested = Subset(Subset(Offering(), np.array([1, 3, 5])), np.array([0, 2]))
    for some in (nested, pickle.loads(pickle.dumps(nested))):
        assert [some[0], some[1]] == [1, 5] and [some.path(0), some.path(1)] == ["1.png", "5.png"]
        assert some.prepare(7) == -7 and np.array_equal(some.labels, [1, 1])
        plain = some.without_augmentation()
        assert plain.note == "plain" and [plain[0], plain[1]] == [1, 5]
        some.will_read(np.array([1]))
        assert some.dataset.dataset.asked == [5]
        with pytest.raises(AttributeError, match=r"row_of\(\), as it may take an index: call dataset\.row_of"):
            some.row_of(0)
    for name in ("path", "prepare", "will_read", "without_augmentation"):
        assert not hasattr(Subset([1, 2, 3], np.array([0])), name)


def test_loaders_use_the_whole_batches_and_arrays_of_a_subset(caplog):
    dataset = Subset(arrays(), np.arange(7, 27))
    for copied in (dataset, copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
        epochs = []
        for loader in (WorkerLoader(copied, 20, seed=0), ResidentLoader(copied, 20, seed=0)):
            with loader:
                first, second = [batch["image"] for _ in range(2) for batch in loader]
            assert not torch.equal(first, second)  # augmented afresh
            epochs.append(torch.stack([first, second]))
        assert torch.equal(*epochs)  # both draw by row, as read_batch does
    assert not caplog.records  # such as that it is read only once


def test_each_part_of_a_split_has_a_sample_the_fraction_is_rounded_and_the_part_is_not_augmented():
    for length, fraction, part in ((2, 0.99, 1), (10, 0.25, 2), (3, 0.5, 2), (9, 0.99, 8), (9, 0.05, 1)):
        rest, kept = split(list(range(length)), fraction)
        assert len(kept) == part and sorted([*rest.indices, *kept.indices]) == list(range(length))
    _, kept = split(arrays(), 0.2)
    assert torch.equal(read_batch(kept, 10)["image"], read_batch(arrays(train=False), kept.indices)["image"])
    for samples, share in ((1, 0.5), (9, 1.0), (9, -0.1)):
        with refused(rf"data.val_fraction={share} of {samples} samples: "):
            split([7] * samples, share)
    assert split(list(range(10)), 0.3)[1].indices.tolist() == [2, 4, 6]  # on every machine
