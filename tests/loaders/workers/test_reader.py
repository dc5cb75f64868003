"""A dataset's sample_spec, read_batch and will_read: what they get, what they may add, and when they count."""

import multiprocessing

import numpy as np
import pytest
from example_datasets import Written, plain

from loaders import Random, WorkerLoader


class Partly(Written):
    """Samples from 90 on are bad."""

    def before(self, index):
        if index >= 90:
            raise ValueError(f"{index} is bad")

    def read_batch(self, indices, out, random):
        assert {len(tensor) for tensor in out.values()} == {len(indices)}
        super().read_batch(indices, out, random)


def read(dataset, *indices, **settings):
    """The batch of these samples."""
    with WorkerLoader(dataset, batch_sampler=[indices], seed=1, **settings) as loader:
        return next(loader)


def test_read_batch_gets_a_stream_for_each_row(reader):
    batch = read(Partly(99), 7, 5, 7, **reader)
    assert batch["index"].tolist() == [7, 5, 7]
    expected = Random(1, 0, np.arange(3), np.array([7, 5, 7])).uniform(3)
    assert batch["noise"].tolist() == expected.tolist()


@pytest.mark.parametrize(("indices", "on_error"), [([1, 2, 3], "raise"), ([1, 92, 3], "skip")])
def test_fields_that_read_batch_adds_are_those_of_the_samples_that_are_left(indices, on_error, reader):
    class Named(Partly):
        def read_batch(self, indices, out, random):
            super().read_batch(indices, out, random)
            out["names"] = [f"sample {index}" for index in indices]

    batch = read(Named(99), *indices, on_error=on_error, **reader)
    assert batch["names"] == [f"sample {index}" for index in indices if index < 90]
    assert batch["index"].tolist() == [index for index in indices if index < 90]


def test_a_collate_fn_of_ones_own_gets_what_getitem_returns_instead(reader):
    class Single(Written):
        def read_batch(self, indices, out, random):
            raise AssertionError("the collate_fn would get no samples")

    with WorkerLoader(Single(4), 2, seed=0, collate_fn=lambda samples: samples, **reader) as loader:
        assert [[sample["index"] for sample in batch] for batch in loader] == [[0, 1], [2, 3]]


class Foretold(Written):
    """Each row of a batch says which samples the dataset was told that it reads next."""

    next_one = None

    def __init__(self, length):
        super().__init__(length)
        self.go = multiprocessing.Event()

    def will_read(self, indices):
        assert indices.dtype == np.int64
        self.next_one = indices.tolist()

    def read_batch(self, indices, out, random):
        super().read_batch(indices, out, random)
        assert self.go.wait(60)
        out["next"] = [self.next_one] * len(indices)
        self.next_one = None


def test_a_dataset_is_told_of_the_next_batch_while_it_reads_one():
    dataset = Foretold(24)
    with WorkerLoader(dataset, 4, shuffle=True, seed=0, num_workers=1, prefetch_factor=4) as loader:
        iterator = iter(loader)
        dataset.go.set()  # by now the worker has more tasks than one
        batches = [plain(batch) for batch in iterator]
    told = [batch["next"][0] for batch in batches]
    following = [batch["index"] for batch in batches[1:]]
    assert told[1] == following[1] and told[-1] is None
    assert all(indices in (None, after) for indices, after in zip(told, following, strict=False))
