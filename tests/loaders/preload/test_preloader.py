"""Preloader over any loader, and its thread; what all loaders promise is in test_contract.py."""

import itertools
import logging
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import loaders.preload.epoch
from loaders import Preloader, Random, SeededLoader, TorchLoader, WorkerLoader

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 3])
THREADED = pytest.mark.parametrize("depth", [1, 3])


class Batches:
    """A loader without any of a loader's methods: each epoch is a generator's."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            yield torch.tensor([number])


class Blocking:
    """Its second batch does not come before `release` is set, which its own close() does."""

    def __init__(self) -> None:
        self.reached, self.release = threading.Event(), threading.Event()
        self.closed = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.tensor([0])
        self.reached.set()
        assert self.release.wait(60)
        yield torch.tensor([1])

    def close(self) -> None:
        self.closed = True
        self.release.set()


@pytest.fixture
def make():
    made: list[weakref.ref] = []

    def make(loader, depth: int = 2, device: str = "cpu", transform=None) -> Preloader:
        preloader = Preloader(loader, device, depth, transform)
        made.append(weakref.ref(preloader))
        return preloader

    yield make
    for preloader in made:
        if preloader() is not None:
            preloader().close()


@pytest.fixture
def blocking():
    source = Blocking()
    yield source
    source.release.set()


@pytest.fixture
def impatient(monkeypatch):
    """The end of an epoch does not wait long for a thread that does not come back."""
    monkeypatch.setattr(loaders.preload.epoch, "JOIN_SECONDS", 0.05)
    monkeypatch.setattr(loaders.preload.epoch, "GIVE_UP_SECONDS", 0.05)


@pytest.fixture
def preloading():
    """The preloaders' threads that the test has running."""
    before = set(threading.enumerate())
    return lambda: [one for one in threading.enumerate() if one.name == "preloader" and one not in before]


def outcome(iterator) -> Any:
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


@pytest.mark.parametrize(("depth", "num_workers", "persistent"), [(0, 2, False), (1, 0, False), (3, 2, True)])
def test_the_stock_dataloader_is_a_loader(make, depth, num_workers, persistent):
    stock = DataLoader(Numbers(10), batch_size=3, num_workers=num_workers, persistent_workers=persistent)
    loader = make(stock, depth)
    attributes = len(loader), loader.dataset, loader.sampler, loader.batch_sampler
    assert attributes == (4, stock.dataset, stock.sampler, stock.batch_sampler)
    assert next(iter(loader)).tolist() == [0, 1, 2]  # and no more of this epoch
    for _ in range(2):
        assert contents(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert next(loader).tolist() == [0, 1, 2]


@pytest.mark.parametrize("depth", [0, 2])
def test_set_epoch_reaches_the_sampler_within_a_stock_dataloaders_batch_sampler(make, depth):
    def distributed() -> DistributedSampler:
        return DistributedSampler(Numbers(12), num_replicas=2, rank=0, shuffle=True, seed=3)

    loader = make(DataLoader(Numbers(12), batch_sampler=BatchSampler(distributed(), 3, drop_last=False)), depth)
    for epoch in (0, 4, 1):
        loader.set_epoch(epoch)
        sampler = distributed()
        sampler.set_epoch(epoch)
        assert [index for batch in contents(loader) for index in batch] == list(sampler)


def test_a_depth_and_a_device_that_make_no_sense_are_refused_in_words(make):
    for depth in (-1, 1.5, "2", None, True):
        with pytest.raises(ValueError, match="give the number of batches to prepare ahead"):
            make([], depth)
    for device in ("gpu", "cuda:99"):
        with pytest.raises(RuntimeError, match=f"device='{device}'.*use.*'cpu'|use a number below"):
            make([], 2, device)


class Foreign(Batches):
    """Attributes of the names that ours have, which are something else; its `close` and its state are as ours."""

    rank = set_epoch = timeline = None
    stats = state_at = "a string"

    def seed(self, number: int) -> None:
        raise AssertionError

    def state_dict(self, prefix: str) -> dict:
        raise AssertionError

    def load_state_dict(self, state: dict, prefix: str) -> None:
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

        def to(self, device) -> "Other":
            other = Other()
            other.device = str(device)
            return other

    class Itself(Other):
        def to(self, device) -> None:
            self.device = str(device)

    (batch,) = make([[Other(), {"a": Itself()}, "text"]], 0, "meta")
    assert (batch[0].device, batch[1]["a"].device, batch[2]) == ("meta", "meta", "text")


# Errors


def raising(error: BaseException):
    """A transform that raises at batch 1."""

    def transform(batch: torch.Tensor, random) -> torch.Tensor:
        if batch[0] == 1:
            raise error
        return batch

    return transform


OUT_OF_MEMORY = "out of memory on cpu while preparing a batch of 1 samples with depth={depth}: lower the batch size"
STOPPED = "preparing a batch raised StopIteration"
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
def test_a_loaders_error_comes_in_its_place_with_its_traceback_and_the_epoch_goes_on(make, depth):
    class Failing:
        number = -1

        def __iter__(self):
            return self

        def __next__(self) -> torch.Tensor:
            self.number += 1
            if self.number == 1:
                raise LookupError("batch 1 is bad")
            if self.number == 3:
                raise StopIteration
            return torch.tensor([self.number])

    iterator = iter(make(Failing(), depth))
    first, error, last, end = (outcome(iterator) for _ in range(4))
    assert (first, str(error), last, end) == (0, "batch 1 is bad", 2, None)
    assert "in __next__" in "".join(traceback.format_exception(error))


@DEPTHS
@pytest.mark.parametrize("where", ["loader", "transform"])
def test_next_raises_base_exceptions_too(make, depth, where):
    def batches():
        yield torch.tensor([0])
        if where == "loader":
            raise SystemExit("stop")
        yield torch.tensor([1])

    iterator = iter(make(batches(), depth, transform=raising(SystemExit("stop"))))
    assert next(iterator).item() == 0
    with pytest.raises(SystemExit, match="stop"):
        next(iterator)


# The transform's random numbers


def draw(batch: torch.Tensor, random) -> torch.Tensor:
    return torch.cat([batch.double(), torch.from_numpy(random.uniform(2))])


@DEPTHS
def test_the_transforms_random_numbers_depend_on_nothing_but_seed_epoch_batch_and_rank(make, depth):
    def loader(depth: int, **settings) -> Preloader:
        return make(WorkerLoader(Numbers(10), 2, shuffle=True, seed=5, **settings), depth, transform=draw)

    inline, other = loader(0), loader(depth)
    epochs = [contents(inline) for _ in range(3)]
    torch.manual_seed(1)
    assert [contents(other) for _ in range(3)] == epochs
    draws = [tuple(batch[-2:]) for epoch in epochs for batch in epoch]
    assert len(set(draws)) == 15, "they differ from batch to batch and from epoch to epoch"
    assert draws[7] == tuple(Random(5, 1, 2, 0).uniform(2))
    assert contents(loader(depth, rank=1, world_size=2))[0][-2:] == Random(5, 0, 0, 1).uniform(2).tolist()


@DEPTHS
def test_over_a_loader_that_counts_no_epochs_the_preloader_does(make, depth):
    loader, same = make(Batches(3), depth, transform=draw), make(Batches(3), 0, transform=draw)
    epochs = [contents(loader) for _ in range(3)]
    assert len({tuple(batch[-2:]) for epoch in epochs for batch in epoch}) == 9
    assert [contents(same) for _ in range(3)] == epochs
    loader.set_epoch(1)
    assert [contents(loader) for _ in range(2)] == epochs[1:]


# Its state


def seeded() -> WorkerLoader:
    return WorkerLoader(Numbers(20), 2, shuffle=True, seed=5)


class Generator(SeededLoader):
    """A subclass whose iterator is not ours."""

    def __iter__(self):
        yield from super().__iter__()


@DEPTHS
def test_over_an_iterator_that_is_not_ours_the_state_is_what_its_consumer_received(make, depth):
    loader, expected = make(Generator(Numbers(20), 2, shuffle=True, seed=5), depth), contents(seeded())
    assert contents(itertools.islice(iter(loader), 4)) == expected[:4]
    loader.close()
    assert loader.state_dict()["samples"] == 8
    resumed = make(seeded(), depth)
    resumed.load_state_dict(loader.state_dict())
    assert contents(resumed) == expected[4:]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("named_after", [1, 2, 3])
def test_without_batches_left_the_state_is_that_of_the_epoch_that_set_epoch_has_named(depth, named_after):
    states = []
    for make in (lambda loader: loader, lambda loader: Preloader(loader, "cpu", depth)):
        with make(TorchLoader(range(4), 2, sampler=range(4), seed=0)) as loader:
            loader.set_epoch(4)
            iterator = iter(loader)
            for number, is_end in ((1, False), (2, False), (3, True)):
                assert (next(iterator, None) is None) == is_end
                if number == named_after:
                    loader.set_epoch(7)
                if number > 1:
                    states.append(loader.state_dict())
    assert states[:2] == states[2:]


@DEPTHS
def test_the_state_of_another_loader_is_passed_on_as_it_is(make, depth):
    class Counting(Batches):
        first = 0

        def __iter__(self):
            while self.first < self.count:
                self.first += 1
                yield torch.tensor([self.first])

        def state_dict(self) -> dict:
            return {"batches": self.first}

        def load_state_dict(self, state: dict) -> None:
            self.first = state["batches"]

    loader = make(Counting(9), depth)
    assert [next(loader).item() for _ in range(3)] == [1, 2, 3]
    state = loader.state_dict()
    assert state == {"batches": 3}
    loader.load_state_dict(state)
    assert next(loader).item() == 4


# One epoch at a time, and its thread


class Counting:
    """An endless loader that notes how far ahead of the consumer's requests it is asked, and by whom."""

    def __init__(self) -> None:
        self.requests, self.started = 0, 0
        self.lead, self.threads = [], set()
        self._progress = threading.Condition()

    def __iter__(self):
        return self

    def __next__(self) -> torch.Tensor:
        with self._progress:
            self.started += 1
            self.lead.append(self.started - self.requests)
            self.threads.add(threading.current_thread())
            self._progress.notify_all()
        return torch.tensor([self.started])

    def take(self, iterator, bound: float, ahead: int) -> None:
        """Takes a batch, and waits until the loader has been asked for `ahead` more than were taken."""
        self.requests += 1
        next(iterator)
        with self._progress:
            assert self._progress.wait_for(lambda: self.started >= self.requests + ahead, bound)


@DEPTHS
def test_the_thread_is_ahead_by_depth_batches_and_stats_count_them(make, bound, depth, preloading):
    source = Counting()
    loader = make(source, depth)
    assert set(loader.stats()["preloader"].values()) == {0}
    iterator = iter(loader)
    for _ in range(50):
        source.take(iterator, bound, ahead=depth)
    assert len(preloading()) == bool(depth)
    stats = loader.stats()["preloader"]
    assert (stats["batches"], stats["queued"] in (depth - 1, depth, 0)) == (50, True)
    assert stats["wait_seconds"] > 0
    loader.close()
    assert max(source.lead) == depth
    assert len(source.threads) == 1
    assert (threading.current_thread() in source.threads) == (depth == 0)


@THREADED
def test_a_delivered_batch_is_not_kept_alive_while_the_next_one_is_made(make, blocking, bound, depth):
    loader = make(blocking, depth)
    alive = weakref.ref(next(loader))
    assert blocking.reached.wait(bound)
    assert alive() is None
    blocking.release.set()


@THREADED
def test_close_frees_the_batches_that_were_prepared_and_closes_a_generator(make, bound, depth):
    alive, ended, far = [], threading.Event(), threading.Event()

    def batches():
        try:
            for number in itertools.count():
                batch = torch.tensor([number])
                alive.append(weakref.ref(batch))
                if number == depth:
                    far.set()
                yield batch
                del batch
        finally:
            ended.set()

    loader = make(batches(), depth)
    next(loader)
    assert far.wait(bound)
    loader.close()
    loader.close()
    assert ended.is_set()
    assert [batch for batch in alive if batch() is not None] == []
    with pytest.raises(RuntimeError, match="this Preloader is closed"):
        iter(loader)


def test_set_epoch_waits_until_no_thread_uses_the_loader(make, blocking, in_thread, bound):
    named = []
    blocking.set_epoch = lambda epoch: named.append((epoch, blocking.release.is_set()))
    loader = make(blocking)
    iter(loader)
    assert blocking.reached.wait(bound)
    loader.set_epoch(7)
    again = in_thread(iter, loader)
    assert named == []
    blocking.release.set()
    again.result(bound)
    assert named == [(7, True)]


# Closing


@pytest.mark.timeout(60)
def test_close_ends_a_thread_that_waits_for_its_loader_and_wakes_a_waiting_consumer(
    make, blocking, impatient, in_thread, bound, preloading
):
    loader = make(blocking)
    iterator = iter(loader)
    next(iterator)
    consumer = in_thread(next, iterator)
    assert blocking.reached.wait(bound)
    loader.close()
    assert blocking.closed
    assert preloading() == []
    with pytest.raises(RuntimeError, match="ended this epoch"):
        consumer.result(bound)


@pytest.mark.timeout(60)
def test_close_gives_up_a_thread_that_does_not_come_back_and_says_so(make, blocking, impatient, bound, caplog):
    loader = make(iter(blocking))  # a generator
    next(loader)
    assert blocking.reached.wait(bound)
    with caplog.at_level(logging.WARNING, logger="loaders"):
        loader.close()
    assert "left behind" in caplog.text


NEVER_CLOSED = """
import threading
import torch
from loaders import Preloader

waits_for_room = iter(Preloader([torch.zeros(1)] * 100, "cpu", 2))
next(waits_for_room)
started = threading.Event()

def silent():
    started.set()
    threading.Event().wait()
    yield

never_answered = iter(Preloader(silent(), "cpu", 2))
started.wait()
"""


@pytest.mark.timeout(90)
def test_an_interpreter_exits_at_once_and_without_an_error_though_nothing_was_closed(python):
    done = python.run("-c", NEVER_CLOSED, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
