"""Preloader over any loader. Its thread: test_preloader_thread.py; what all loaders promise: test_contract.py."""

import itertools
import threading
import traceback

import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from loaders import Preloader, Random, SeededLoader, WorkerLoader
from loaders.errors import warn_once

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 3])


class Batches:
    """A loader without any of a loader's methods: each epoch is a generator's."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            yield torch.tensor([number])


def outcome(iterator):
    """What next() gives: a number, or an error; None at the end of the epoch."""
    try:
        return next(iterator).item()
    except StopIteration:
        return None
    except Exception as error:
        return error


# Any loader


@DEPTHS
def test_a_generator_is_a_loader(make, depth):
    loader = make(Batches(7), depth)
    assert contents(loader) == [[number] for number in range(7)]
    iterator = iter(loader)
    assert contents(itertools.islice(iterator, 3)) == [[0], [1], [2]]
    assert contents(loader) == [[number] for number in range(7)]
    with pytest.raises(RuntimeError, match="a newer iter"):
        next(iterator)
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize(("depth", "num_workers"), [(0, 2), (1, 0), (3, 2)])
def test_the_stock_dataloader_is_a_loader(make, depth, num_workers):
    stock = DataLoader(Numbers(10), batch_size=3, num_workers=num_workers)
    loader = make(stock, depth)
    attributes = len(loader), loader.dataset, loader.sampler, loader.batch_sampler
    assert attributes == (4, stock.dataset, stock.sampler, stock.batch_sampler)
    assert next(iter(loader)).tolist() == [0, 1, 2]  # and no more of this epoch
    for _ in range(2):
        assert contents(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert next(loader).tolist() == [0, 1, 2]


def test_over_an_iterator_the_next_epoch_goes_on_where_the_consumer_was_and_not_its_thread(make, bound):
    is_ahead = threading.Event()

    def note(batch, random):
        if batch[0] == 20:
            is_ahead.set()
        return batch

    loader = make(iter(WorkerLoader(Numbers(40), 4, num_workers=1)), depth=3, transform=note)
    first = [next(loader).tolist() for _ in range(3)]
    assert is_ahead.wait(bound)
    assert first + contents(loader) == torch.arange(40).view(-1, 4).tolist()


def test_set_epoch_reaches_the_sampler_within_a_stock_dataloaders_batch_sampler(make, depth):
    def distributed():
        return DistributedSampler(Numbers(12), num_replicas=2, rank=0, shuffle=True, seed=3)

    loader = make(DataLoader(Numbers(12), batch_sampler=BatchSampler(distributed(), 3, drop_last=False)), depth)
    for epoch in (0, 4, 1):
        loader.set_epoch(epoch)
        sampler = distributed()
        sampler.set_epoch(epoch)
        assert [index for batch in contents(loader) for index in batch] == list(sampler)


def test_a_depth_and_a_device_that_make_no_sense_are_refused_in_words(make):
    for depth in (-1, 1.5, "2", None, True):
        with pytest.raises(ValueError, match="depth="):
            make([], depth)
    for device, words in (("gpu", "device type .*: gpu"), ("cuda:99", "device='cuda:99'.*use .*'cpu'|a number below")):
        with pytest.raises(RuntimeError, match=words):
            make([], 2, device)


class Foreign(Batches):
    """Attributes of the names that ours have, which are something else; its `close` and its state are as ours."""

    rank = set_epoch = timeline = None
    stats = state_at = "a string"

    def seed(self, number):
        raise AssertionError

    def state_dict(self, prefix):
        raise AssertionError

    def load_state_dict(self, state, prefix):
        raise AssertionError


@DEPTHS
def test_attributes_of_the_right_names_that_are_not_ours_are_left_alone(make, depth):
    loader = make(Foreign(3), depth, transform=lambda batch, random: batch + random.uniform(1)[0])
    loader.timeline = None
    loader.set_epoch(2)
    same = make(Batches(3), depth, transform=lambda batch, random: batch + random.uniform(1)[0])
    same.set_epoch(2)
    assert contents(loader) == contents(same)
    assert set(loader.stats()) == {"preloader"}


# What moves


def test_an_object_is_moved_by_its_own_method_whatever_that_returns(make):
    class Other:
        device = "cpu"

        def to(self, device):
            other = Other()
            other.device = str(device)
            return other

    class Itself(Other):
        def to(self, device):
            self.device = str(device)

    (batch,) = make([[Other(), {"a": Itself()}, "text"]], 0, "meta")
    assert (batch[0].device, batch[1]["a"].device, batch[2]) == ("meta", "meta", "text")


# Errors. Those of the loader: test_contract_faults.py


def raising(error):
    """A transform that raises at batch 1."""

    def transform(batch, random):
        if batch[0] == 1:
            raise error
        return batch

    return transform


OUT_OF_MEMORY = "out of memory on cpu while preparing a batch of 1 samples with depth={depth}: lower the batch size"
STOPPED = "batch 1 raised StopIteration"
TRANSFORM_ERRORS = {  # what the transform raises, and what comes in the place of the batch
    "an error": (LookupError("odd"), LookupError, "odd"),
    "StopIteration": (StopIteration(), RuntimeError, STOPPED),
    "a full device": (torch.OutOfMemoryError("tried to allocate"), torch.OutOfMemoryError, OUT_OF_MEMORY),
}


@DEPTHS
@pytest.mark.parametrize("what", TRANSFORM_ERRORS)
def test_a_transforms_error_comes_in_its_place_with_its_traceback_and_the_epoch_goes_on(make, depth, what):
    raised, kind, message = TRANSFORM_ERRORS[what]
    loader = make(Batches(3), depth, transform=raising(raised))
    for _ in range(2):
        iterator = iter(loader)
        first, error, last, end = (outcome(iterator) for _ in range(4))
        assert (first, last, end) == (0, 2, None)
        assert type(error) is kind and str(error).startswith(message.format(depth=depth))
        assert "in transform" in "".join(traceback.format_exception(error))


@DEPTHS
@pytest.mark.parametrize("where", ["loader", "transform"])
def test_next_raises_base_exceptions_too_and_at_depth_0_the_host_batch_is_kept(make, depth, where):
    errors = [SystemExit("stop")]

    def stop(batch, random=None):
        if batch[0] == 1 and errors:
            raise errors.pop()
        return batch

    iterator = iter(make(map(stop, Batches(2)) if where == "loader" else Batches(2), depth, transform=stop))
    assert next(iterator).item() == 0
    with pytest.raises(SystemExit, match="stop"):
        next(iterator)
    if (where, depth) == ("transform", 0):
        assert next(iterator).item() == 1


# The transform's random numbers


def draw(batch, random):
    return torch.cat([batch.double(), torch.from_numpy(random.uniform(2))])


@DEPTHS
def test_the_transforms_random_numbers_have_the_key_seed_epoch_batch_number_and_rank(make, depth):
    for rank in (0, 1):
        inner = WorkerLoader(Numbers(20), 2, shuffle=True, seed=5, rank=rank, world_size=2)
        loader = make(inner, depth, transform=draw)
        for epoch in range(2):
            draws = [batch[-2:] for batch in contents(loader)]
            assert draws == [Random(5, epoch, number, rank).uniform(2).tolist() for number in range(5)]


@DEPTHS
def test_over_a_loader_that_counts_no_epochs_the_preloader_does(make, depth):
    loader = make(Batches(3), depth, transform=draw)
    same = make(Batches(3), 0, transform=draw)
    epochs = [contents(loader) for _ in range(3)]
    assert len({tuple(batch[-2:]) for epoch in epochs for batch in epoch}) == 9
    assert [contents(same) for _ in range(3)] == epochs
    loader.set_epoch(1)
    assert [contents(loader) for _ in range(2)] == epochs[1:]


# Its state


def seeded():
    return WorkerLoader(Numbers(20), 2, shuffle=True, seed=5)


class Generator(SeededLoader):
    """A subclass whose iterator is not ours."""

    def __iter__(self):
        yield from super().__iter__()


@DEPTHS
def test_over_an_iterator_that_is_not_ours_the_state_is_what_its_consumer_received(make, depth):
    loader = make(Generator(Numbers(20), 2, shuffle=True, seed=5), depth)
    expected = contents(seeded())
    assert contents(itertools.islice(iter(loader), 4)) == expected[:4]
    loader.close()
    assert loader.state_dict()["samples"] == 8
    resumed = make(seeded(), depth)
    resumed.load_state_dict(loader.state_dict())
    assert contents(resumed) == expected[4:]


@DEPTHS
def test_the_state_of_another_loader_is_passed_on_as_it_is(make, depth):
    class Counting(Batches):
        first = 0

        def __iter__(self):
            while self.first < self.count:
                self.first += 1
                yield torch.tensor([self.first])

        def state_dict(self):
            return {"batches": self.first}

        def load_state_dict(self, state):
            self.first = state["batches"]

    loader = make(Counting(9), depth)
    assert [next(loader).item() for _ in range(3)] == [1, 2, 3]
    state = loader.state_dict()
    assert state == {"batches": 3}
    loader.load_state_dict(state)
    assert next(loader).item() == 4


@pytest.mark.parametrize("depth", [0, 2])
def test_an_iterator_that_has_no_batch_left_for_another_epoch_is_warned_of(depth, caplog):
    warn_once.cache_clear()
    pairs = zip([1, 2], [3, 4], strict=True)
    with Preloader(pairs, "cpu", depth) as once, Preloader([[1], [2]], "cpu", depth) as again:
        assert list(once) == [(1, 3), (2, 4)] and list(again) == list(again)
        assert not caplog.messages
        assert list(once) == []
    assert "a Preloader over a zip gave no batch in epoch 1" in caplog.text
