"""What programs do beside reading batches: odd batches, names of their own, contexts, alarms, subclasses."""

import signal

import pytest
import torch
from example_datasets import Numbers, contents, outcomes

from loaders import Preloader, WorkerLoader

WORKERS = pytest.mark.parametrize("workers", [0, 1])
TENS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# Batches of all kinds


class Unpicklable(ValueError):
    def __reduce__(self):
        raise TypeError("not to be pickled")


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self):
        return torch.zeros, ("not here",)


@pytest.mark.parametrize(
    ("seed", "over"), [(0, lambda loader: loader), (None, lambda loader: Preloader(loader, "cpu"))]
)
def test_what_cannot_travel_is_one_error_in_its_place(seed, over):
    def collate(samples):
        if 0 in samples:
            raise Unpicklable("sample 0 is bad")
        odd = {4: Unreadable(), 8: lambda: 0}
        return odd.get(samples[0], torch.tensor(samples))

    with over(WorkerLoader(Numbers(14), 4, num_workers=2, seed=seed, collate_fn=collate)) as loader:
        error, unreadable, unpicklable, last = outcomes(loader)
    assert "sample 0 is bad" in error and "zeros()" in unreadable and "pickle" in unpicklable
    assert last == [12, 13]


# Names that are not ours


class Sharded(WorkerLoader):
    """A subclass with attributes of its own before and after ours."""

    def __init__(self, *args, **settings):
        self.name = "mine"
        super().__init__(*args, **settings)
        self.tuner = self.plan = self.order = 5

    def collate(self):
        return -100


@WORKERS
def test_a_subclass_keeps_its_own_names_and_a_seed_needs_a_seeded_base(workers):
    with Sharded(Numbers(10), 4, num_workers=workers) as loader:
        assert contents(loader) == contents(loader) == TENS
        assert (loader.name, loader.tuner, loader.collate()) == ("mine", 5, -100)
    with pytest.raises((TypeError, ValueError), match="SeededLoader"):
        Sharded(Numbers(10), 4, seed=0)


# What a worker may do


class Alarming:
    """An alarm comes when it is unpickled, the first time in each process."""

    is_due = True

    def __reduce__(self):
        return rebuilt, ()


def rebuilt():
    if Alarming.is_due:
        Alarming.is_due = False
        signal.raise_signal(signal.SIGALRM)
    return "rebuilt"


def test_an_alarm_while_a_batch_is_unpickled_is_raised_and_the_batch_is_not_lost(seed, alarm):
    Alarming.is_due = True
    with WorkerLoader([Alarming()] * 3, 1, num_workers=1, seed=seed, collate_fn=list) as loader:
        iterator = iter(loader)
        with pytest.raises(TimeoutError):
            next(iterator)
        assert list(iterator) == [["rebuilt"]] * 3


class Opened(Numbers):
    """Its samples can be read once it was opened."""

    place = None

    def open(self, worker):
        self.place = 100

    def __getitem__(self, index):
        assert self.place is not None
        return self.place + index


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_init_fn_that_is_a_method_of_the_dataset_has_the_dataset_that_is_read(seed, method):
    dataset = Opened(2)
    settings = {"num_workers": 1, "multiprocessing_context": method, "seed": seed}
    with WorkerLoader(dataset, 2, worker_init_fn=dataset.open, **settings) as loader:
        assert contents(loader) == [[100, 101]]


# torch.compile of a function that holds the loop

COMPILED_LOOP = """
import torch
from loaders import Preloader, WorkerLoader

@torch.compile(backend="eager")
def total(loader):
    found = torch.zeros(())
    for (numbers,) in loader:
        found = found + (numbers * 2).sum()
    return found

dataset = torch.utils.data.TensorDataset(torch.arange(12.0))
with WorkerLoader(dataset, 4, num_workers=1) as plain, WorkerLoader(dataset, 4, num_workers=1, seed=0) as seeded:
    print([total(loader).item() for loader in (plain, seeded, seeded, Preloader(seeded, "cpu", 1))])
"""


@pytest.mark.timeout(90)
def test_a_compiled_function_may_hold_the_whole_loop(python):
    done = python.run("-c", COMPILED_LOOP, timeout=80)
    assert done.stdout == "[132.0, 132.0, 132.0, 132.0]\n", done.stderr
