"""What a dataset's own methods do counts: an override is called, StopIteration is an error, __getitems__ is enough."""

import numpy as np
import pytest
import torch
from example_datasets import Noisy, Numbers, Written, contents, failing, outcomes
from torch.utils.data import IterableDataset, default_collate

from loaders import ResidentLoader, UnequalSamples, WorkerLoader

LENGTH = 12
BATCH_SIZE = 4
FIRST = [0, 1, 2, 3]
LAST = [8, 9, 10, 11]


# Which methods count


class EveryMethod(Numbers):
    """Sample i is i, through each method that a dataset may have."""

    def __getitem__(self, index):
        return {"number": torch.tensor(index)}

    def sample_spec(self):
        return {"number": ((), torch.int64)}

    def read_batch(self, indices, out, random):
        out["number"].copy_(torch.from_numpy(indices))

    def arrays(self):
        return {"number": np.arange(self.length)}


class Tripled(EveryMethod):
    """A forker's first edit."""

    def __getitem__(self, index):
        return {"number": torch.tensor(3 * index)}


class Wrapper(Numbers):
    """Has another dataset's methods by __getattr__, but its own samples."""

    __getitem__ = Tripled.__getitem__

    def __getattr__(self, name):
        return getattr(EveryMethod(LENGTH), name)


class OnTheInstance(Numbers):
    """Has the other methods as attributes of the object alone."""

    __getitem__ = Tripled.__getitem__

    def __init__(self, length):
        super().__init__(length)
        written = EveryMethod(length)
        self.sample_spec = written.sample_spec
        self.read_batch = written.read_batch
        self.arrays = written.arrays


class WrittenAnew(Tripled):
    """Brings the faster methods up to date with what it inherits."""

    def __getitem__(self, index):
        raise AssertionError("read_batch and arrays are there")

    def read_batch(self, indices, out, random):
        out["number"].copy_(torch.from_numpy(7 * indices))

    def arrays(self):
        return {"number": 7 * np.arange(self.length)}


@pytest.mark.parametrize(("kind", "factor"), [(Tripled, 3), (Wrapper, 3), (OnTheInstance, 3), (WrittenAnew, 7)])
def test_faster_methods_count_only_beside_the_getitem_that_is_in_force(kind, factor, reader):
    expected = [factor * index for index in range(LENGTH)]
    with WorkerLoader(kind(LENGTH), BATCH_SIZE, seed=0, **reader) as loader:
        assert torch.cat([batch["number"] for batch in loader]).tolist() == expected
    with ResidentLoader(kind(LENGTH), BATCH_SIZE) as loader:
        assert torch.cat([batch["number"] for batch in loader]).tolist() == expected


@pytest.mark.parametrize("spec", [{"number": 3}, {"number": ((), "int64")}, {"number": (("x",), torch.int8)}, []])
def test_a_sample_spec_that_is_no_spec_is_refused_with_what_it_returned(spec):
    dataset = type("Odd", (WrittenAnew,), {"sample_spec": lambda self: spec})(4)
    with pytest.raises(ValueError, match="sample_spec") as refusal:
        list(WorkerLoader(dataset, 2, seed=0))
    assert repr(spec) in str(refusal.value)


class Replaced(WrittenAnew):
    def read_batch(self, indices, out, random):
        out["number"] = torch.from_numpy(indices)


class Added(WrittenAnew):
    def read_batch(self, indices, out, random):
        out["number"][:] = 0
        out["weight"] = torch.ones(len(indices))


class Half(WrittenAnew):
    """Forgets the second half of its rows."""

    def read_batch(self, indices, out, random):
        out["number"][: len(indices) // 2] = 0


def test_read_batch_that_replaces_a_tensor_is_named_and_rows_that_it_forgets_are_under_debug(reader, monkeypatch):
    with WorkerLoader(Replaced(4), 2, seed=0, **reader) as loader:
        assert "number" in outcomes(loader)[0]
    with (
        WorkerLoader(Added(4), 2, seed=0, **reader) as loader,
        pytest.raises(ValueError, match=r"added.*weight.*add the"),
    ):
        list(loader)
    monkeypatch.setenv("LOADERS_DEBUG", "1")
    with WorkerLoader(Half(4), 4, seed=0, **reader) as loader:
        (said,) = outcomes(loader)
        assert "number" in said and "2" in said


# StopIteration


@pytest.mark.parametrize("where", [Noisy, Written, "collate_fn"])
def test_stop_iteration_is_the_error_of_its_batch_and_never_the_end_of_the_epoch(where, reader):
    def stops_at_4(samples):
        return next(iter(())) if samples[0] == 4 else {"index": torch.tensor(samples)}

    if where == "collate_fn":
        dataset = Numbers(LENGTH)
        reader["collate_fn"] = stops_at_4
    else:
        dataset = failing(where, "stop", (5,), length=LENGTH)
    with WorkerLoader(dataset, BATCH_SIZE, seed=0, persistent_workers=True, **reader) as loader:
        for _ in range(2):
            first, error, last = outcomes(loader)
            assert "StopIteration" in error and (first["index"], last["index"]) == (FIRST, LAST)


# Datasets with __getitems__


class Both(Numbers):
    """A sample is whether it was read by `__getitems__`."""

    def __getitem__(self, index):
        return False

    def __getitems__(self, indices):
        return [True for _ in indices]


def test_getitems_is_called_if_there_is_no_seed_or_threads_read_which_seed_nothing(seed, reader):
    with WorkerLoader(Both(LENGTH), BATCH_SIZE, seed=seed, **reader) as loader:
        reads_together = {read for batch in loader for read in batch.tolist()}
    assert reads_together == {seed is None or reader.get("worker_method") == "thread"}


class Forwarding(Numbers):
    """Sample i is False; a dataset inside has the other methods."""

    __getitem__ = Both.__getitem__

    def __getattr__(self, name):
        return getattr(Both(LENGTH), name)


def test_getitems_of_a_dataset_inside_is_not_called_with_a_seed(reader):
    with WorkerLoader(Forwarding(LENGTH), BATCH_SIZE, seed=0, **reader) as loader:
        assert not any(read for batch in loader for read in batch.tolist())


class Together:
    """Samples that can be had several at a time only, with a draw."""

    def __len__(self):
        return LENGTH

    def __getitems__(self, indices):
        return [[index, torch.rand(()).item()] for index in indices]


def test_getitems_alone_is_enough(seed, reader):
    with WorkerLoader(Together(), BATCH_SIZE, seed=seed, **reader) as loader:
        batches = contents(loader)
    assert [indices for indices, _ in batches] == [FIRST, [4, 5, 6, 7], LAST]
    if seed is not None and reader.get("worker_method") != "thread":
        with WorkerLoader(Together(), BATCH_SIZE, seed=seed) as inline:
            assert contents(inline) == batches
        assert len({draw for _, draws in batches for draw in draws}) == LENGTH


class Uneven(Numbers):
    """Sample 6 is longer than the others, and sample 5 cannot be read."""

    def __getitem__(self, index):
        if index == 5:
            raise KeyError(index)
        number = {"number": torch.zeros(3, 4 + (index == 6))}
        return {**number, "text": "a"} if index % 2 else {"text": "a", **number}


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}, {"worker_method": "thread"}])
def test_of_samples_that_make_no_batch_the_one_that_differs_is_named(options):
    options = {"num_workers": 1, "seed": 0, "on_error": "skip", **options}
    said = r"sample 6 is number: torch.float32 \(3, 5\), text: str, and sample 4 is number: torch.float32 \(3, 4\)"
    with WorkerLoader(Uneven(LENGTH), BATCH_SIZE, **options) as loader, pytest.raises(UnequalSamples, match=said):
        list(loader)
    lacking = [{"number": 1, "text": "a"}, {"text": "a"}]
    with (
        WorkerLoader(lacking, 2, **options) as loader,
        pytest.raises(UnequalSamples, match="sample 1 is text: str, and"),
    ):
        list(loader)
    mine = {**options, "collate_fn": lambda samples: torch.stack([sample["number"] for sample in samples])}
    with WorkerLoader(Uneven(LENGTH), BATCH_SIZE, **mine) as loader, pytest.raises(RuntimeError, match="equal size"):
        list(loader)


def test_what_makes_no_batch_even_alone_is_not_put_down_to_a_difference_that_does_no_harm():
    """An int and a float make a batch; None does not."""
    samples = [{"score": 0, "mask": None}, {"score": 0.5, "mask": None}]
    said = "sample 0 is mask: NoneType, score: int, which no batch can have .*NoneType"
    with WorkerLoader(samples, 2, seed=0) as loader, pytest.raises(UnequalSamples, match=said):
        list(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_mirrored_array_is_named_with_the_reason(num_workers):
    samples = [np.arange(3)] * 3 + [np.arange(3)[::-1]] * 2
    said = "sample 3 is int64 .3,., which no batch can have .*stride.* is negative"
    loader = WorkerLoader(samples, 5, num_workers=num_workers, seed=0)
    with loader, pytest.raises(UnequalSamples, match=said):
        list(loader)


class UnevenStream(IterableDataset):
    def __init__(self, last):
        self.last = last

    def __iter__(self):
        yield from (torch.zeros(3), torch.zeros(3), self.last)


@pytest.mark.parametrize(
    ("last", "said"), [(torch.zeros(4), r"2 of a batch of stream 0 is torch.float32 \(4,\)"), (None, "NoneType")]
)
def test_a_sample_of_a_stream_that_makes_no_batch_is_named(last, said):
    loader = WorkerLoader(UnevenStream(last), 3, num_workers=0, seed=0, streams=1)
    with loader, pytest.raises(UnequalSamples, match=said):
        list(loader)


@pytest.mark.parametrize("samples", [[torch.zeros(3), torch.zeros(4)], [torch.zeros(3), None]])
def test_without_a_seed_samples_that_make_no_batch_raise_torchs_own_error(samples):
    with pytest.raises((RuntimeError, TypeError)) as expected:
        default_collate(samples)
    with WorkerLoader(samples, 2, num_workers=1) as loader, pytest.raises(expected.type) as raised:
        list(loader)
    assert raised.type is expected.type and str(expected.value) in str(raised.value)
