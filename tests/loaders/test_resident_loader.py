"""What is particular to ResidentLoader; what all loaders promise is in test_contract.py."""

from functools import partial

import numpy as np
import pytest
import torch
from example_datasets import Augmented, Faulty, Numbers, contents

from data.array_dataset import ArrayDataset
from loaders import (
    Accelerator,
    MachineFull,
    Preloader,
    Random,
    ResidentLoader,
    WorkerLoader,
    can_take_groups,
    takes_groups,
)
from loaders import resident_loader as module
from tests.data.fakes import arrays

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


images = partial(arrays, count=30, size=(7, 6, 3), classes="abc")


class Arrays(Numbers):
    """Sample i is 10 * i, from arrays; augmentation adds the first of a row's random numbers."""

    def arrays(self):
        return {"value": np.arange(self.length) * 10.0}

    def augment_batch(self, batch, random):
        return batch if random is None else {"value": batch["value"] + torch.from_numpy(random.uniform(1)[:, 0])}


class Counted(Numbers):
    """Counts how often each sample is read."""

    def __init__(self, length):
        super().__init__(length)
        self.reads = [0] * length

    def __getitem__(self, index):
        self.reads[index] += 1
        return {"image": torch.full((2, 3), index % 256, dtype=torch.uint8), "label": torch.tensor(-index)}


@pytest.fixture
def make(closed_later):
    def make(dataset, batch_size=4, shuffle=True, *others, kind=ResidentLoader, **settings):
        return closed_later(kind(dataset, batch_size, shuffle, *others, **settings))

    return make


def assert_equal(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name, field in batch.items():
            assert (field.dtype, field.shape) == (other[name].dtype, other[name].shape)
            assert torch.equal(field.cpu(), other[name].cpu()), name


# Arrays


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [{}, {"rank": 1, "world_size": 3}])
@pytest.mark.parametrize("options", [{}, {"size": (5, 5, 1), "pad": 0, "transform": ["crop"]}])
def test_augmented_batches_are_to_the_bit_those_of_workers_after_a_resume_too(make, options, order, device):
    dataset = images(**options)
    resident = make(dataset, device=device, seed=3, **order)
    workers = make(dataset, kind=WorkerLoader, seed=3, **order)
    for _ in range(2):
        assert_equal(resident, workers)
    iterator = iter(workers)
    next(iterator)
    resumed = make(dataset, device=device, seed=3, **order)
    resumed.load_state_dict(workers.state_dict())
    assert_equal(resumed, iterator)


@pytest.mark.parametrize("augment", [None, False])
def test_without_augmentation_samples_are_those_of_the_dataset_though_a_step_writes_to_its_batch(make, augment):
    resident = make(images(), shuffle=False, augment=augment)
    expected = make(images(train=False), shuffle=False, kind=WorkerLoader, seed=0)
    for _ in range(2):
        assert_equal(resident, expected)
        for batch in resident:
            batch["image"].zero_()


def test_an_augmentation_of_ones_own_takes_the_place_of_the_datasets(make):
    keys = []

    def double(batch, random):
        keys.extend(random.key.tolist())
        return {"value": batch["value"] * 2}

    loader = make(Arrays(6), augment=double, shuffle=False, seed=5)
    assert [batch["value"].tolist() for batch in loader] == [[0, 20, 40, 60], [80, 100]]
    assert keys == Random(5, 0, np.arange(6), np.arange(6)).key.tolist()


def test_arrays_of_another_length_are_refused(make):
    dataset = Arrays(6)
    dataset.arrays = lambda: {"value": np.zeros((5, 2))}
    with pytest.raises(ValueError, match=r"Arrays.arrays\(\) .*'value' .*\(5, 2\).*\b6\b"):
        iter(make(dataset))


@pytest.mark.parametrize("arrays", [(np.zeros((6, 2)), np.zeros(6)), None, {"value": [[1], [1, 2]]}, {"value": ["a"]}])
def test_what_is_no_dict_of_arrays_is_refused(make, arrays):
    dataset = Arrays(6)
    dataset.arrays = lambda: arrays
    with pytest.raises(ValueError, match=rf"Arrays.arrays\(\) returned a {type(arrays).__name__}"):
        iter(make(dataset))


@pytest.mark.parametrize("array", [np.arange(6)[::-1], np.arange(6, dtype=">i4"), np.arange(12)[::2]])
def test_arrays_of_any_strides_and_byte_order_are_taken(make, array):
    dataset = Arrays(6)
    dataset.arrays = lambda: {"value": array}
    loader = make(dataset, batch_size=6, shuffle=False, augment=None)
    assert [batch["value"].tolist() for batch in loader] == [array.tolist()]


# Groups


class Counting:
    """An augmentation and a transform that count the rows of each call, and add the numbers of their keys."""

    def __init__(self):
        self.rows = []

    def __call__(self, batch, random):
        self.rows.append(len(batch["value"]))
        key = torch.from_numpy(random.uniform(1)[..., 0]).reshape(-1)
        return {"value": batch["value"] + key.repeat_interleave(len(batch["value"]) // len(key))}


class CountingGroups(Counting):
    takes_groups = True


def counted(make, augment, transform, length=50, depth=0, **settings):
    """The batches of one epoch, and how many rows each call got."""
    loader = make(Arrays(length), augment=augment, seed=3, **settings)
    batches = [batch["value"].tolist() for batch in make(loader, "cpu", depth, transform, kind=Preloader)]
    return batches, augment.rows, transform.rows


@pytest.mark.parametrize("augment", [Counting, CountingGroups])
@pytest.mark.parametrize("transform", [Counting, CountingGroups])
def test_what_takes_groups_is_called_once_for_many_batches_and_gives_the_same_bytes(make, augment, transform, depth):
    batches, augmented, transformed = counted(make, augment(), transform(), depth=depth)
    alone = [4] * 12 + [2]
    assert batches == counted(make, Counting(), Counting())[0]
    assert augmented == ([48, 2] if augment is CountingGroups else alone)
    assert transformed == ([48, 2] if {augment, transform} == {CountingGroups} else alone)


@pytest.mark.parametrize(("name", "limit"), [("BATCHES", 3), ("SAMPLES", 12), ("BYTES", 12 * 8)])
def test_a_group_is_bounded_in_batches_samples_and_bytes(make, name, limit, monkeypatch):
    monkeypatch.setattr(module, name, limit)
    _, augmented, _ = counted(make, CountingGroups(), CountingGroups(), length=32)
    assert augmented == [12, 12, 8]


def test_a_method_that_overrides_one_that_takes_groups_gets_one_batch_at_a_time(make):
    lengths = []

    class Mixed(ArrayDataset):
        def augment_batch(self, batch, random):
            lengths.append(len(batch["label"]))
            return super().augment_batch(batch, random)

    assert can_take_groups(images().augment_batch) and not can_take_groups(Mixed.augment_batch)
    dataset = images()
    dataset.__class__ = Mixed
    list(make(dataset))
    assert lengths == [4] * 7 + [2]


@pytest.mark.parametrize("batch_size", [3, 8])  # with 3, rows do not begin where torch aligns memory
def test_a_step_may_change_its_batch_in_place_while_autograd_keeps_another_of_the_group(make, batch_size):
    expected = [batch["value"].clone() for batch in make(Arrays(24), batch_size, shuffle=False)]
    iterator = iter(make(Arrays(24), batch_size, shuffle=False))
    first = next(iterator)["value"]
    weight = torch.ones(batch_size, dtype=first.dtype, requires_grad=True)
    loss = (weight * first).sum()
    for batch, other in zip(iterator, expected[1:], strict=True):
        assert torch.equal(batch["value"], other)
        batch["value"].unsqueeze_(1).fill_(-1)
    loss.backward()
    assert torch.equal(weight.grad, expected[0])


def test_an_error_in_a_group_is_raised_in_its_batchs_place_and_the_others_are_delivered(make):
    @takes_groups
    def refuses_ten(batch, random):
        if (batch["value"] == 100).any():
            raise ValueError("value 100 is bad")
        return batch

    iterator = iter(make(Arrays(24), augment=refuses_ten, shuffle=False))
    delivered = [next(iterator)["value"][0].item() for _ in range(2)]
    with pytest.raises(ValueError, match="value 100 is bad"):
        next(iterator)
    delivered += [batch["value"][0].item() for batch in iterator]
    assert delivered == [0, 40, 120, 160, 200]


# Datasets that are read once


@pytest.mark.parametrize("batch_size", [4, 99])
def test_each_sample_is_read_once_and_not_before_the_first_epoch(make, batch_size):
    dataset = Counted(10)
    loader = make(dataset, batch_size)
    assert loader.stats() == {"resident": {"bytes": 0}}
    assert dataset.reads == [0] * 10
    for _ in range(2):
        batches = list(loader)
        assert sorted(-torch.cat([batch["label"] for batch in batches])) == list(range(10))
        assert all((batch["image"] == -batch["label"][:, None, None]).all() for batch in batches)
        assert batches[0]["image"].dtype == torch.uint8
    assert dataset.reads == [1] * 10
    assert loader.stats() == {"resident": {"bytes": 10 * (6 + 8)}}


def test_what_a_dataset_draws_stays_as_first_drawn_and_depends_on_the_seed(make):
    def samples(loader):
        return sorted(torch.cat([torch.stack(batch) for batch in loader], dim=1).T.tolist())

    loader = make(Augmented(10), seed=1)
    first = samples(loader)
    assert samples(loader) == first == samples(make(Augmented(10), seed=1, batch_size=3))
    assert samples(make(Augmented(10), seed=2)) != first
    assert len({draw for _, *draws in first for draw in draws}) == 30


class Told(Counted):
    """Has other samples in each epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return super().__getitem__(index)["label"] + 100 * self.epoch


def test_a_dataset_that_has_changed_is_read_again(make):
    dataset = Told(4)
    loader = make(dataset, shuffle=False)
    for epoch in (0, 0, 2):
        dataset.set_epoch(epoch)
        assert contents(loader) == [[100 * epoch - index for index in range(4)]]
    assert dataset.reads == [2] * 4


def test_after_an_error_of_the_dataset_reading_can_be_tried_again(make):
    dataset = Faulty(6, 4)
    loader = make(dataset, shuffle=False)
    with pytest.raises(ValueError, match="sample 4 is bad"):
        iter(loader)
    assert loader.state_dict()["epoch"] == 0
    dataset.bad = ()
    assert contents(loader) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([torch.zeros(2), torch.zeros(2), torch.zeros(3)], r"number 2 on are torch.float32 \(3,\), and sample 0 is"),
        ([(1, "one"), (2, "two")], "such as a text.*leave it out"),
    ],
)
def test_samples_that_do_not_make_one_tensor_are_refused_in_words(make, samples, words, monkeypatch):
    monkeypatch.setattr(module, "READ_AT_ONCE", 2)
    with pytest.raises(ValueError, match=words):
        iter(make(samples))


def test_indices_that_a_sampler_gives_are_those_of_the_dataset(make):
    batches = [[-1, 0], [2, -6], [5, 6], [0.5], [], [torch.tensor(3)]]
    iterator = iter(make(Arrays(6), batch_sampler=batches, batch_size=1, augment=False, shuffle=False))
    assert [next(iterator)["value"].tolist() for _ in range(2)] == [[50, 0], [20, 0]]
    for number in (6, 0.5, ""):
        with pytest.raises(IndexError, match=rf"\[{number}\]"):
            next(iterator)
    assert next(iterator)["value"].tolist() == [30]


# Memory and device


def test_a_set_that_does_not_fit_is_refused_with_both_sizes_before_it_is_read(make, monkeypatch):
    dataset = Counted(20_000)  # a sample takes 6 + 8 bytes
    free = 200_000
    monkeypatch.setattr(Accelerator, "free_bytes", lambda self: free)
    with pytest.raises(MachineFull, match=r"0.3 MB on cpu for 20,000 samples.*0.2 MB.*loader=prefetch"):
        iter(make(dataset))
    assert sum(dataset.reads) == module.READ_AT_ONCE
    free = 10 * 14
    iter(make(Counted(10)))
    free -= 1
    with pytest.raises(MachineFull):
        iter(make(Counted(10)))


@pytest.mark.cuda
def test_a_batch_is_made_without_waiting_for_the_device(make):
    loader = make(images(count=400), batch_size=100, device="cuda")
    list(loader)  # first uses may synchronise
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    next(iter(loader))
    busy = torch.cuda.Event()
    busy.record()
    assert not busy.query(), "the sleep was over when next() returned: something waited for the device"
