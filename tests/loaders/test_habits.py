"""What programs do with batches and loaders beside reading them: hand on, keep in workers, interrupt, reset."""

import copy
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import DataLoader, default_collate

from loaders import WorkerLoader

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


# Who may still read a batch


@MODES
def test_a_forked_child_reads_its_batch_though_the_parent_has_dropped_it_and_goes_on(mode, bound):
    with WorkerLoader(Rows(), 4, **mode) as loader:
        iterator = iter(loader)
        next(iterator)
        batch = next(iterator)
        asks, asked = os.pipe()
        answers, answered = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(asked)
            os.read(asks, 1)  # returns when the parent closes its end
            os.write(answered, pickle.dumps(batch[:, 0].tolist()))
            os._exit(0)
        os.close(asks)
        os.close(answered)
        del batch
        rest = contents(iterator)
        assert len(rest) == 18
        os.close(asked)
        with os.fdopen(answers, "rb") as file:
            assert pickle.loads(file.read()) == [4, 5, 6, 7]
        os.waitpid(pid, 0)


class OverBatch:
    """A dataset of a batch's rows, which says what its workers find there after the batch was dropped elsewhere."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, index: int) -> int:
        return int(self.batch[index].sum())


@MODES
def test_workers_of_another_loader_read_the_batch_that_it_was_made_from(mode):
    with WorkerLoader(Rows(), 4, **mode) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        with WorkerLoader(OverBatch(batch), 1, num_workers=1, persistent_workers=True) as other:
            assert contents(other) == [[0], [1000], [2000], [3000]]
            del other.dataset.batch, batch
            other.dataset.batch = range(4)  # for its length; the worker has the batch
            assert len(list(iterator)) == 19
            assert contents(other) == [[0], [1000], [2000], [3000]]


class Support(Rows):
    """Keeps what default_collate makes in the worker, and checks that it stays as it is."""

    def __getitem__(self, index: int) -> torch.Tensor:
        kept = self.__dict__.setdefault("kept", {})
        for number, batch in list(kept.items()):
            assert (batch == number).all(), "overwritten"
        kept[index] = default_collate([super().__getitem__(index)] * 2)
        return kept[index][0]


@MODES
def test_what_a_dataset_collates_and_keeps_is_not_overwritten(mode):
    with WorkerLoader(Support(), 4, **mode) as loader:
        for _ in range(2):
            assert all((batch == batch[:, :1]).all() for batch in loader)


class Bank:
    """A collate_fn that keeps its batches, and checks that they stay as they are."""

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        assert all((batch == copy).all() for batch, copy in self.kept), "overwritten"
        batch = default_collate(samples)
        self.kept.append((batch, batch.clone()))
        return batch


@MODES
def test_what_a_collate_fn_keeps_is_not_overwritten(mode):
    with WorkerLoader(Rows(), 4, collate_fn=Bank(), **mode) as loader:
        for _ in range(2):
            assert len([batch for batch in loader if (batch == batch[:, :1]).all()]) == 20


class Table(Rows):
    """Each worker divides its array once."""

    def __init__(self) -> None:
        super().__init__(16)
        self.table = np.asfortranarray(np.full((500, 500), 255.0))

    def __getitem__(self, index: int) -> tuple[float, bool]:
        if "divided" not in vars(self):
            self.divided = True
            self.table /= 255
        return float(self.table[index, index]), bool(self.table.flags.f_contiguous)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_each_worker_that_is_not_forked_has_its_own_copy_of_a_large_array(method):
    with WorkerLoader(Table(), 4, num_workers=2, multiprocessing_context=method) as loader:
        for values, is_fortran in loader:
            assert (values == 1).all() and is_fortran.all()


# What a worker may do


class Runs(Rows):
    def __getitem__(self, index: int) -> int:
        return subprocess.run(["false"], check=False).returncode


@SEEDS
def test_a_dataset_learns_how_its_programs_ended_though_the_parent_handles_sigchld(seed):
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        with WorkerLoader(Runs(4), 2, num_workers=1, seed=seed) as loader:
            assert contents(loader) == [[1, 1], [1, 1]]
    finally:
        signal.signal(signal.SIGCHLD, before)


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


class Trainable(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)).requires_grad_(index % 2 == 1)


@SEEDS
def test_without_workers_some_samples_may_require_a_gradient(seed):
    with WorkerLoader(Trainable(4), 2, seed=seed) as loader:
        assert [batch.requires_grad for batch in loader] == [True, True]


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


class Interrupting(Numbers):
    """Ctrl-C comes while sample 5 is read for the first time."""

    struck = False

    def __getitem__(self, index: int) -> int:
        if index == 5 and not self.struck:
            self.struck = True
            raise KeyboardInterrupt
        return index


@SEEDS
def test_without_workers_an_iterator_goes_on_after_ctrl_c(seed):
    with WorkerLoader(Interrupting(12), 4, seed=seed) as loader:
        iterator, seen = iter(loader), []
        for _ in range(2):
            with suppress(KeyboardInterrupt):
                for batch in iterator:
                    seen.append(batch.tolist())
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_only_a_loader_with_a_seed_is_an_iterator():
    assert not isinstance(WorkerLoader(Numbers(4), 2), Iterator)
    assert isinstance(WorkerLoader(Numbers(4), 2, seed=0), Iterator)


class Raised(Numbers):
    add = 0

    def __getitem__(self, index: int) -> int:
        return index + self.add


@SEEDS
def test_persistent_workers_are_started_anew_for_a_program_that_sets_iterator_to_none(seed):
    with WorkerLoader(Raised(4), 2, num_workers=1, persistent_workers=True, seed=seed) as loader:
        assert contents(loader) == [[0, 1], [2, 3]]
        loader.dataset.add = 10
        loader._iterator = None
        assert contents(loader) == [[10, 11], [12, 13]]


@SEEDS
def test_a_program_may_shut_the_workers_down_by_torchs_private_name(seed):
    loader = WorkerLoader(Numbers(64), 4, num_workers=1, persistent_workers=True, seed=seed)
    iterator = iter(loader)
    next(iterator)
    loader._iterator._shutdown_workers()
    with pytest.raises(RuntimeError):
        next(iterator)
    loader.close()
    assert not multiprocessing.active_children()


@SEEDS
def test_an_iterator_cannot_be_copied_as_under_torchs_class(seed):
    with WorkerLoader(Numbers(12), 4, num_workers=1, seed=seed) as loader:
        iterator = iter(loader)
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(NotImplementedError, match="cannot be"):
                duplicate(iterator)
        assert len(list(iterator)) == 3


@SEEDS
def test_a_loader_can_be_pickled_in_any_state(seed):
    with WorkerLoader(Numbers(12), 4, num_workers=1, persistent_workers=True, seed=seed) as loader:
        iterator = iter(loader)
        next(iterator)
        for dumps in (pickle.dumps, ForkingPickler.dumps):
            copied = pickle.loads(dumps(loader))
            assert len(copied) == 3
            copied.close()


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
