"""Preloader over any loader, and its thread; what all loaders promise is in test_contract.py."""

import copy
import gc
import itertools
import logging
import pickle
import threading
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import loaders.preload.epoch
from loaders import Preloader, TorchLoader
from loaders.base import Position

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


def outcomes(iterator) -> list:
    """What each call of next() gave until the epoch's end: a number, or an error."""
    seen: list = []
    while True:
        try:
            seen.append(next(iterator).item())
        except StopIteration:
            return seen
        except Exception as error:
            seen.append(error)


def text(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


# Any loader


@DEPTHS
def test_a_generator_is_a_loader(make, depth):
    loader = make(Batches(7), depth)
    assert contents(loader) == [[number] for number in range(7)]
    iterator = iter(loader)
    assert contents(itertools.islice(iterator, 3)) == [[0], [1], [2]]
    assert contents(loader) == [[number] for number in range(7)]
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize(("depth", "num_workers", "persistent"), [(0, 2, False), (1, 0, False), (3, 2, True)])
def test_the_stock_dataloader_is_a_loader(make, depth, num_workers, persistent):
    stock = DataLoader(Numbers(10), batch_size=3, num_workers=num_workers, persistent_workers=persistent)
    loader = make(stock, depth)
    assert (len(loader), loader.dataset, loader.sampler, loader.batch_sampler) == (
        4,
        stock.dataset,
        stock.sampler,
        stock.batch_sampler,
    )
    assert next(iter(loader)).tolist() == [0, 1, 2]  # and no more of this epoch
    for _ in range(2):
        assert contents(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert next(loader).tolist() == [0, 1, 2]


def distributed() -> DistributedSampler:
    return DistributedSampler(Numbers(12), num_replicas=2, rank=0, shuffle=True, seed=3)


@DEPTHS
@pytest.mark.parametrize(
    "stock",
    [
        lambda: DataLoader(Numbers(12), batch_size=3, sampler=distributed()),
        lambda: DataLoader(Numbers(12), batch_sampler=BatchSampler(distributed(), 3, drop_last=False)),
    ],
    ids=["as its sampler", "within its batch sampler"],
)
def test_set_epoch_reaches_the_sampler_of_a_stock_dataloader(make, depth, stock):
    loader = make(stock(), depth)
    for epoch in (0, 4, 1):
        loader.set_epoch(epoch)
        sampler = distributed()
        sampler.set_epoch(epoch)
        assert [index for batch in contents(loader) for index in batch] == list(sampler)


@pytest.mark.parametrize("depth", [-1, 1.5, "2", None, True])
def test_a_depth_that_makes_no_sense_is_refused_in_words(make, depth):
    with pytest.raises(ValueError, match="give the number of batches to prepare ahead"):
        make([], depth)


# Errors


class Failing:
    """Batches 0 to 2, but 1 raises instead; iterating goes on after an error."""

    def __iter__(self):
        self._number = -1
        return self

    def __next__(self) -> torch.Tensor:
        self._number += 1
        if self._number == 1:
            self.raise_deep_inside()
        if self._number == 3:
            raise StopIteration
        return torch.tensor([self._number])

    def raise_deep_inside(self) -> None:
        raise LookupError("batch 1 is bad")


def raising(error: Exception):
    """A transform that raises at batch 1."""

    def transform(batch: torch.Tensor, random) -> torch.Tensor:
        if batch[0] == 1:
            raise error
        return batch

    return transform


OUT_OF_MEMORY = (
    "out of memory on cpu while preparing a batch of 1 samples with depth={depth}: "
    "lower the batch size or the depth (loader.preload_depth)"
)
MIXED = [torch.tensor([0]), [torch.tensor(1), torch.ones(2, device="meta")], torch.tensor([2])]
ERRORS = {  # the loader, the transform, and what comes in the place of batch 1
    "the loader": (Failing, None, LookupError, "batch 1 is bad", "in raise_deep_inside"),
    "the transform": (lambda: Batches(3), raising(LookupError("odd")), LookupError, "odd", "in transform"),
    "a transform's StopIteration": (
        lambda: Batches(3),
        raising(StopIteration()),
        RuntimeError,
        "reading or transforming a batch raised StopIteration",
        "in transform",
    ),
    "a full device": (
        lambda: Batches(3),
        raising(torch.OutOfMemoryError("tried to allocate 20 GiB")),
        torch.OutOfMemoryError,
        OUT_OF_MEMORY,
        "tried to allocate 20 GiB",
    ),
    "two devices": (lambda: MIXED, None, ValueError, "a batch has tensors on cpu and meta", "have the loader give"),
}


@DEPTHS
@pytest.mark.parametrize("of", ERRORS)
def test_an_error_comes_in_its_place_with_its_traceback_and_the_epoch_goes_on(make, depth, of):
    loader, transform, kind, message, traced = ERRORS[of]
    loader = make(loader(), depth, transform=transform)
    for _ in range(2):
        first, error, last = outcomes(iter(loader))
        assert (first, last) == (0, 2)
        assert type(error) is kind and str(error).startswith(message.format(depth=depth))
        assert traced in text(error)


@DEPTHS
def test_a_batch_whose_transform_raised_counts_in_the_state(make, depth):
    loader = make(TorchLoader(Numbers(4), 1), depth, transform=raising(LookupError("odd")))
    assert [outcome if outcome == 0 else "error" for outcome in (next_of(loader), next_of(loader))] == [0, "error"]
    resumed = make(TorchLoader(Numbers(4), 1), depth)
    resumed.load_state_dict(loader.state_dict())
    assert contents(resumed) == [[2], [3]]


def next_of(loader) -> Any:
    try:
        return next(loader).item()
    except LookupError as error:
        return error


@DEPTHS
def test_an_error_at_the_epochs_beginning_comes_out_of_iter(make, depth):
    class Unstartable:
        def __iter__(self):
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        iter(make(Unstartable(), depth))


@DEPTHS
def test_next_raises_base_exceptions_too(make, depth):
    class Interrupted:
        def __iter__(self):
            yield torch.tensor([0])
            raise SystemExit("stop")

    iterator = iter(make(Interrupted(), depth))
    assert next(iterator).item() == 0
    with pytest.raises(SystemExit, match="stop"):
        next(iterator)


# The transform's random numbers


def draw(batch: torch.Tensor, random) -> torch.Tensor:
    return torch.cat([batch.double(), torch.from_numpy(random.uniform(2))])


@DEPTHS
def test_the_transforms_random_numbers_depend_on_nothing_but_seed_epoch_and_batch(make, depth):
    def loader(depth: int) -> Preloader:
        return make(TorchLoader(Numbers(10), 2, shuffle=True, seed=5), depth, transform=draw)

    inline, other = loader(0), loader(depth)
    epochs = [contents(inline) for _ in range(3)]
    torch.manual_seed(1)
    assert [contents(other) for _ in range(3)] == epochs
    draws = [tuple(batch[-2:]) for epoch in epochs for batch in epoch]
    assert len(set(draws)) == 15, "they differ from batch to batch and from epoch to epoch"

    other.set_epoch(1)
    iterator = iter(other)
    assert contents(itertools.islice(iterator, 2)) == epochs[1][:2]
    resumed = loader(depth)
    resumed.load_state_dict(other.state_dict())
    assert contents(resumed) == epochs[1][2:]


@DEPTHS
def test_over_a_loader_that_counts_no_epochs_the_preloader_does(make, depth):
    loader, same = make(Batches(3), depth, transform=draw), make(Batches(3), 0, transform=draw)
    epochs = [contents(loader) for _ in range(3)]
    assert len({tuple(batch[-2:]) for epoch in epochs for batch in epoch}) == 9
    assert [contents(same) for _ in range(3)] == epochs
    loader.set_epoch(1)
    assert [contents(loader) for _ in range(2)] == epochs[1:]


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
def test_the_thread_is_ahead_by_depth_and_one_batches_and_stats_count_them(make, bound, depth, preloading):
    source, ahead = Counting(), depth + bool(depth)
    source.stats = lambda: {"restarts": 3}
    loader = make(source, depth)
    assert set(loader.stats()["preloader"].values()) == {0}
    iterator = iter(loader)
    for _ in range(50):
        source.take(iterator, bound, ahead=ahead)
    assert len(preloading()) == bool(depth)
    stats = loader.stats()
    assert (stats["restarts"], stats["preloader"]["batches"], stats["preloader"]["queued"]) == (3, 50, depth)
    assert stats["preloader"]["wait_seconds"] > 0
    loader.close()
    assert max(source.lead) == ahead
    assert len(source.threads) == 1
    assert (threading.current_thread() in source.threads) == (depth == 0)


class Timing:
    """Its second call raises an error that belongs to no batch."""

    def __init__(self) -> None:
        self.position = Position(0)
        self.calls = 0

    def __iter__(self):
        return self

    def __next__(self) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("timed out")
        if self.position.batch == 3:
            raise StopIteration
        self.position.batch += 1
        return torch.tensor([self.position.batch - 1.0])

    def state_dict(self) -> dict:
        return {"epoch": 0, "samples": self.position.batch, "global_batch_size": 1}

    load_state_dict = None


@DEPTHS
def test_an_error_that_belongs_to_no_batch_moves_no_number_and_no_random_numbers(make, depth):
    loader = make(Timing(), depth, transform=draw)
    first = next(loader).tolist()
    with pytest.raises(RuntimeError, match="timed out"):
        next(loader)
    assert loader.state_dict()["samples"] == 1
    rest = [next(loader).tolist() for _ in range(2)]
    assert [first, *rest] == contents(make([torch.tensor([float(n)]) for n in range(3)], 0, transform=draw))


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
                if number == depth + 1:
                    far.set()
                yield batch
                del batch
        finally:
            ended.set()

    loader = make(batches(), depth)
    next(loader)
    assert far.wait(bound)
    loader.close()
    assert ended.is_set()
    assert [batch for batch in alive if batch() is not None] == []


@DEPTHS
def test_an_iterator_keeps_its_preloader_alive(make, depth):
    iterator = iter(make(Batches(20), depth))
    assert next(iterator).item() == 0
    gc.collect()
    assert contents(iterator) == [[number] for number in range(1, 20)]


@THREADED
def test_a_preloader_in_a_cycle_is_collected_in_any_thread(make, in_thread, bound, depth, preloading):
    loader = make(Counting(), depth)
    loader.myself = loader
    next(iter(loader))
    (thread,) = preloading()
    alive = weakref.ref(loader)
    del loader
    in_thread(gc.collect).result(bound)
    assert alive() is None
    thread.join(bound)
    assert not thread.is_alive()


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


class OneAtATime:
    """A loader that notes every call that comes while another is under way; next() takes until `go` is set."""

    def __init__(self) -> None:
        self.overlaps, self.calls = [], []
        self.entered, self.go = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def _use(self, name: str, wait: bool = False) -> None:
        self.calls.append(name)
        if not self._lock.acquire(blocking=False):
            self.overlaps.append(name)
            return
        try:
            if wait:
                self.entered.set()
                assert self.go.wait(60)
        finally:
            self._lock.release()

    def __iter__(self):
        self._use("iter")
        return self

    def __next__(self) -> torch.Tensor:
        self._use("next", wait=True)
        return torch.zeros(1)

    def set_epoch(self, epoch: int) -> None:
        self._use(f"set_epoch {epoch}")

    def state_dict(self) -> dict:
        self._use("state_dict")
        return {}

    def load_state_dict(self, state: dict) -> None:
        self._use("load_state_dict")

    def close(self) -> None:
        self.calls.append("close")
        self.go.set()


@pytest.fixture
def one_at_a_time():
    source = OneAtATime()
    yield source
    source.go.set()


@THREADED
def test_only_one_thread_uses_the_loader_at_a_time(make, one_at_a_time, bound, depth):
    loader = make(one_at_a_time, depth)
    iter(loader)
    assert one_at_a_time.entered.wait(bound)
    loader.set_epoch(7)
    loader.state_dict()
    assert one_at_a_time.overlaps == []
    one_at_a_time.go.set()
    next(iter(loader))
    assert one_at_a_time.overlaps == []
    calls = one_at_a_time.calls
    assert "set_epoch 7" in calls[: len(calls) - calls[::-1].index("iter")], "the next epoch did not hear of it"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("begin_anew", [Preloader.__iter__, lambda loader: loader.load_state_dict({})])
def test_no_epoch_begins_while_the_thread_of_the_last_is_in_a_slow_loader_nor_is_that_closed(
    make, one_at_a_time, impatient, in_thread, bound, begin_anew
):
    loader = make(one_at_a_time)
    iter(loader)
    assert one_at_a_time.entered.wait(bound)
    attempt = in_thread(begin_anew, loader)
    wait([attempt], timeout=0.3)  # it may refuse, or wait for as long as it takes
    assert "close" not in one_at_a_time.calls
    one_at_a_time.go.set()
    attempt.exception(bound)
    assert one_at_a_time.overlaps == []


# The process around it


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


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@DEPTHS
def test_a_preloader_over_a_loader_without_a_state_can_be_copied_and_pickled_while_it_runs(duplicate, depth):
    with Preloader(DataLoader(Numbers(12), 4), "cpu", depth) as loader:
        iterator = iter(loader)
        next(iterator)
        twin = duplicate(loader)
        assert contents(iterator) == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert contents(twin) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        twin.close()
