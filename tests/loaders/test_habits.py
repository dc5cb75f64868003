"""What programs do with batches and loaders beside reading them: hand on, keep in workers, interrupt, reset."""

import copy
import pickle
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import DataLoader, IterableDataset

from loaders import Preloader, WorkerLoader

MODES = pytest.mark.parametrize(
    "mode",
    [
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "seed": 0},
        {"num_workers": 2, "seed": 0, "persistent_workers": True},
        {"num_workers": 2, "seed": 0, "worker_method": "thread"},
        {"num_workers": 0},
    ],
    ids=["unseeded", "unseeded-persistent", "seeded", "seeded-persistent", "threads", "inline"],
)
SEEDS = pytest.mark.parametrize("seed", [None, 0])


class Rows:
    """Sample i is 1,000 times i."""

    def __init__(self, length: int = 80) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), index)


# Threads that share an iterator


class Slow(Numbers):
    """Other threads run while a sample is read."""

    def __getitem__(self, index: int) -> int:
        threading.Event().wait(0.001)
        return index


@MODES
def test_threads_that_share_an_iterator_get_each_batch_once(mode):
    with WorkerLoader(Slow(200), 2, **mode) as loader, ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            iterator = iter(loader)
            parts = threads.map(lambda _, it=iterator: [batch.tolist() for batch in it], range(4), timeout=100)
            assert sorted(chain(*chain(*parts))) == list(range(200))


@pytest.mark.parametrize("depth", [0, 2])
def test_threads_that_share_an_iterator_all_see_its_end(depth):
    barrier = threading.Barrier(3)

    def batches():
        yield from range(3)
        threading.Event().wait(0.1)  # meanwhile the others ask, too

    with ThreadPoolExecutor(3) as threads:
        iterator = iter(Preloader(batches(), "cpu", depth))
        parts = threads.map(lambda _: (barrier.wait(), [*iterator])[1], range(3), timeout=100)
        assert sorted(chain(*parts)) == [0, 1, 2]


# What a worker may do


class TimeLimit(Exception):
    pass


class Limited(Rows):
    """A sample that takes too long is replaced."""

    def __getitem__(self, index: int) -> int:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            threading.Event().wait(30)
            return -1
        except TimeLimit:
            return index
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@SEEDS
def test_a_dataset_may_limit_the_time_for_a_sample_by_the_programs_alarm(seed):
    def expire(*_: object) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, expire)
    try:
        with WorkerLoader(Limited(4), 2, num_workers=1, seed=seed) as loader:
            assert contents(loader) == [[0, 1], [2, 3]]
    finally:
        signal.signal(signal.SIGALRM, before)


# Tensors of all kinds


def as_is(samples: list) -> list:
    return samples


@SEEDS
def test_thousands_of_small_tensors_arrive_whole(seed):
    with WorkerLoader(Rows(3000), 3000, num_workers=1, collate_fn=as_is, seed=seed) as loader:
        (batch,) = loader
        assert [int(tensor[0]) for tensor in batch] == list(range(3000))


@SEEDS
def test_batches_may_be_as_large_as_a_file_may_be(seed):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, hard))
    try:
        with WorkerLoader(Rows(4000), 500, num_workers=2, seed=seed) as loader:  # batches of 4 MB
            assert all((batch == batch[:, :1]).all() for batch in loader)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# What programs do to a loader


@SEEDS
def test_an_iterator_cannot_be_copied_as_under_torchs_class(seed):
    with WorkerLoader(Numbers(12), 4, num_workers=1, seed=seed) as loader:
        iterator = iter(loader)
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(NotImplementedError, match="cannot be"):
                duplicate(iterator)
        assert len(list(iterator)) == 3


@pytest.mark.slow  # importing the compiler takes seconds
@MODES
def test_a_compiled_function_may_contain_the_loop(mode):
    loader = WorkerLoader(Numbers(12), 4, **mode)

    def total() -> torch.Tensor:
        sum_ = torch.zeros(())
        for batch in loader:
            sum_ = sum_ + batch.float().sum()
        return sum_

    with loader:
        assert torch.compile(total, backend="eager")() == sum(range(12))


# Names that belong to the program


def sharded(base: type) -> type:
    """A subclass with attributes of its own, some of which have the names of WorkerLoader's arguments."""

    class Sharded(base):
        def __init__(self, *args, **settings) -> None:
            self.rank, self.world_size, self.seed, self.on_error, self._stats = 1, 2, 5, "skip", 6
            super().__init__(*args, **settings)
            self.last_batch, self.timeline, self.tuner, self._epochs, self._iterators = range(5)

        def pad(self) -> int:
            return -100

        def __getstate__(self) -> dict:
            return {**self.__dict__, "_iterator": None}

        def names(self) -> dict:
            return {name: value for name, value in vars(self).items() if isinstance(value, (int, str))}

    return Sharded


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_subclass_keeps_its_own_names(num_workers):
    def seen(base: type) -> list:
        loader = sharded(base)(range(6), batch_size=2, num_workers=num_workers)
        iterator = iter(loader)
        next(iterator)
        twin = copy.copy(loader)
        return [contents(loader), contents(twin), loader.names(), twin.names(), twin.pad()]

    assert seen(WorkerLoader) == seen(DataLoader)


class Unfinished(WorkerLoader):
    """Has not called WorkerLoader.__init__ yet."""

    def __init__(self) -> None:
        self.name = "mine"

    @property
    def broken(self) -> None:
        raise AttributeError("the reason")


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_subclass_may_be_copied_before_it_calls_init(way):
    assert way(Unfinished()).name == "mine"


def test_an_attribute_error_of_a_property_is_not_replaced():
    with pytest.raises(AttributeError, match="the reason"):
        Unfinished().broken  # noqa: B018
    with pytest.raises(AttributeError, match="'Unfinished' object has no attribute 'other'"):
        Unfinished().other  # noqa: B018


def test_an_error_keeps_its_context_though_the_consumer_handles_another_one():
    class Explained(Numbers):
        def __getitem__(self, index: int) -> int:
            try:
                raise KeyError(index)
            except KeyError:
                raise ValueError("no sample")  # noqa: B904

    iterator = iter(WorkerLoader(Explained(4)))
    with pytest.raises(ValueError, match="no sample") as caught:
        try:
            raise OSError("the consumer's")
        except OSError:
            next(iterator)
    assert isinstance(caught.value.__context__, KeyError)


class Opened(Numbers):
    """Its samples can be read once it was opened."""

    place = None

    def open(self, worker: int) -> None:
        self.place = 100

    def __getitem__(self, index: int) -> int:
        return self.place + index

    def __iter__(self):
        yield from map(self.__getitem__, range(self.length))


class OpenedStream(Opened, IterableDataset):
    pass


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(("kind", "seed"), [(Opened, None), (Opened, 0), (OpenedStream, None), (OpenedStream, 0)])
def test_a_worker_init_fn_that_is_a_method_of_the_dataset_has_the_dataset_that_is_read(kind, seed, method):
    dataset = kind(2)
    settings = {"num_workers": 1, "multiprocessing_context": method, "seed": seed}
    if seed is not None and kind is OpenedStream:
        settings["streams"] = 1
    with WorkerLoader(dataset, 2, worker_init_fn=dataset.open, **settings) as loader:
        assert contents(loader) == [[100, 101]]


def test_the_seed_of_a_loader_cannot_be_changed():
    loader = WorkerLoader(range(4), seed=3)
    loader.seed = 3  # as a subclass may do
    with pytest.raises(ValueError, match="seed attribute should not be set after WorkerLoader is initialized"):
        loader.seed = 4


class Timeout(BaseException):
    """As some libraries' time limits are."""


class Late(Numbers):
    """Reading sample 2 raises an error that is no Exception, and no signal's."""

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise Timeout
        return index


def test_a_dataset_that_raises_a_base_exception_inline_is_not_read_again():
    def seen(kind: type) -> list:
        found, iterator = [], iter(kind(Late(4)))
        while len(found) < 9:
            try:
                found.append(next(iterator).tolist())
            except StopIteration:
                break
            except Timeout:
                found.append("timeout")
        return found

    assert seen(WorkerLoader) == seen(DataLoader) == [[0], [1], "timeout", [3]]
