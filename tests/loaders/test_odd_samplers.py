"""Samplers that are not as torch's are: what they give is taken as it is; they fail, never end, or are interrupted."""

import gc
import signal
from itertools import chain, islice

import numpy as np
import pytest
import torch
from every_loader import LOADERS, saved
from example_datasets import Numbers, Written, contents, rows
from example_samplers import AS_BATCHES, BATCH_SIZE, LENGTH, Made, draw_globals, every, over, seed_globals
from torch.utils.data import BatchSampler, Subset

from loaders import WorkerLoader


def refilled(batch):
    """Fills the same list, array or tensor for each batch."""
    make = torch.arange if isinstance(batch, torch.Tensor) else range
    for start in range(0, LENGTH, BATCH_SIZE):
        batch[:] = make(start, start + BATCH_SIZE)
        yield batch


@every()
@pytest.mark.parametrize("batch", [[], np.zeros(BATCH_SIZE, int), torch.zeros(BATCH_SIZE, dtype=int)], ids=type)
def test_a_batch_sampler_may_fill_the_same_batch_again(kind, batch):
    if kind == "torch" and isinstance(batch, torch.Tensor):
        pytest.skip("torch's workers send tensors through a thread that stays")
    with LOADERS[kind].make(Numbers(LENGTH), 1, batch_sampler=Made(lambda: refilled(batch)), seed=0) as loader:
        assert rows(loader) == list(range(LENGTH))


class Restarting(BatchSampler):
    """Is its own iterator, and iter() makes it begin anew, as in Lightning's wrapper."""

    def __iter__(self):
        self.items = super().__iter__()
        return self

    def __next__(self):
        return next(self.items)


def test_an_iterator_of_a_batch_sampler_is_not_iterated_again(seed):
    batches = Restarting(range(100), 1, False)
    with WorkerLoader(Numbers(100), batch_sampler=batches, num_workers=1, seed=seed) as loader:
        assert rows(loader) == list(range(100))


class Batch(list):
    """Can be counted."""


def singles():
    return iter([[index] for index in range(5000)])


@pytest.mark.parametrize("settings", [{"num_workers": 1}, {"seed": 0}])
def test_a_batch_sampler_that_never_ends_takes_no_more_and_more_memory(settings):
    endless = Made(lambda: (Batch([0]) for _ in iter(int, 1)))
    with WorkerLoader(Numbers(1), batch_sampler=endless, **settings) as loader:
        assert sum(len(batch) for batch in islice(loader, 2500)) == 2500
        assert sum(type(item) is Batch for item in gc.get_objects()) < 1500


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("settings", [{"batch_size": None, "sampler": range(5000)}, {"batch_sampler": Made(singles)}])
def test_a_long_sampler_is_delivered_whole_and_resumed_far_behind_its_first_batches(settings, num_workers):
    def loader():
        return WorkerLoader(Numbers(5000), seed=0, num_workers=num_workers, **settings)

    with loader() as first:
        assert [int(batch) for batch in islice(first, 3000)] == list(range(3000))
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        assert [int(batch) for batch in second] == list(range(3000, 5000))


WAYS = {
    "map": lambda: [map(int, batch) for batch in ((3, 1), (2,))],
    "generators": lambda: [(index for index in batch) for batch in ((3, 1), (2,))],
    "tuples": lambda: [(3, 1), (2,)],
}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("dataset", "seed"), [(Numbers(9), None), (Written(9), 0)], ids=["unseeded", "seeded"])
def test_batches_of_indices_may_be_anything_that_torch_iterates(make, seed, dataset):
    with WorkerLoader(dataset, batch_sampler=Made(make), num_workers=1, seed=seed) as loader:
        for _ in range(2):
            batches = [batch["index"] if isinstance(batch, dict) else batch for batch in loader]
            assert contents(batches) == [[3, 1], [2]]


class Named(Numbers):
    """`__getitems__` gets what the sampler gave, whatever it is."""

    __getitem__ = None

    def __getitems__(self, indices):
        return [f"{type(indices).__name__} {sorted(indices)}"]


@pytest.mark.parametrize(("workers", "seed"), [(0, 0), (1, None)])
@pytest.mark.parametrize("batch", [{"rows": 1}, (2, 3), "ab", {4, 5}], ids=type)
def test_getitems_gets_the_batch_as_the_sampler_made_it(batch, seed, workers):
    with WorkerLoader(Named(9), batch_sampler=[batch], num_workers=workers, seed=seed) as loader:
        assert list(loader) == [[f"{type(batch).__name__} {sorted(batch)}"]]


def endless():
    while True:
        yield from torch.randperm(LENGTH).tolist()


@AS_BATCHES
@every("inline", "processes", "preloader", "torch")
def test_an_endless_sampler_is_drawn_as_needed_and_resumed_past_its_length(kind, as_batches):
    with over(kind, Made(endless), as_batches) as whole:
        iterator = iter(whole)
        first = contents(islice(iterator, 10))
        state = saved(whole)
        rest = contents(islice(iterator, 8))
    rounds = list(chain.from_iterable(first + rest))
    assert [sorted(rounds[at : at + LENGTH]) for at in (0, 24, 48)] == [list(range(LENGTH))] * 3
    with over(kind, Made(endless), as_batches) as resumed:
        resumed.load_state_dict(state)
        assert contents(islice(iter(resumed), 8)) == rest


class Failing:
    """Raises after six indices."""

    def __iter__(self):
        yield from range(6)
        raise ValueError("bad sampler")


@every(but="resident")
@pytest.mark.parametrize("sampler", [Failing, lambda: Made(Failing().__iter__)], ids=["no length", "a length"])
def test_a_samplers_error_comes_in_its_place_and_ends_the_epoch(kind, sampler):
    seed_globals(4)
    with over(kind, sampler()) as loader:
        for _ in range(2):
            iterator = iter(loader)
            assert next(iterator).tolist() == [0, 1, 2, 3]
            with pytest.raises(ValueError, match="bad sampler"):
                next(iterator)
            with pytest.raises(StopIteration):
                next(iterator)
    drawn = draw_globals()
    seed_globals(4)
    assert drawn == draw_globals(), "the global generators are as they were"


def not_found():
    raise FileNotFoundError("order.txt")


@AS_BATCHES
def test_a_sampler_that_raises_when_it_is_iterated_is_an_error_of_the_epoch(seed, as_batches):
    sampler = {"batch_sampler" if as_batches else "sampler": Made(not_found)}
    with WorkerLoader(range(8), num_workers=1, seed=seed, **sampler) as loader:
        for _ in range(2):
            with pytest.raises(FileNotFoundError, match=r"order\.txt"):
                next(iter(loader))


def alarmed(at):
    """Draws more than a block; an alarm comes before item `at`, the first time."""
    alarms = [at]

    def indices():
        for number in range(4200):
            if alarms == [number]:
                alarms.clear()
                signal.raise_signal(signal.SIGALRM)
            yield int(np.random.randint(LENGTH))

    return Made(indices)


@pytest.mark.parametrize("at", [2, 4150], ids=["in the first block", "in the second block"])
@every("inline", "processes")
def test_an_alarm_while_a_sampler_draws_is_raised_and_no_batch_is_lost(kind, at, alarm):
    with over(kind, alarmed(-1), batch_size=50) as calm:
        expected = contents(calm)
    iterator = None
    seen = []
    alarms = 0
    with over(kind, alarmed(at), batch_size=50) as loader:
        while len(seen) < len(expected):
            try:
                iterator = iterator or iter(loader)
                seen.append(next(iterator).tolist())
            except TimeoutError:
                alarms += 1
    assert (seen, alarms) == (expected, 1)


@every("inline", "torch", "resident")
def test_a_sampler_is_shared_among_ranks_and_one_without_a_length_leaves_its_loader_without_one(kind):
    for rank, share in enumerate(([[9, 8], [1]], [[5, 4], [9]])):
        with over(kind, [9, 8, 5, 4, 1], batch_size=2, rank=rank, world_size=2) as part:
            assert contents(part) == share
    with over(kind, iter([4, 2, 0]), batch_size=2) as loader:
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        assert contents(iter(loader)) == [[4, 2], [0]]
    for settings in ({"shuffle": True}, {"batch_sampler": [[1, 2]]}):
        with pytest.raises(ValueError, match="sampler"):
            over(kind, [1, 2], **settings)


# Indices outside of the dataset: a sentence with a seed, torch's own error without one

DATASETS = {
    "list": list(range(5)),
    "Subset": Subset(range(100), range(5)),
    "TensorDataset": torch.utils.data.TensorDataset(torch.arange(5)),
    "Limited": type("Limited", (Written,), {"before": lambda self, index: [0, 0, 0, 0, 0][index]})(5),
}


@pytest.mark.parametrize(("kind", "index"), [*((kind, 5) for kind in DATASETS), ("list", -6)])
def test_an_index_outside_of_the_dataset_is_a_sentence(kind, index, reader):
    with WorkerLoader(DATASETS[kind], 2, sampler=[0, 1, 2, index], seed=0, **reader) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(IndexError, match=rf"{index}\b.*{kind}.*\b0 to 4"):
            next(batches)


def test_an_index_that_a_subset_kept_of_a_longer_dataset_is_a_sentence(reader):
    dataset = list(range(10))
    subset = Subset(Subset(dataset, range(2, 10)), range(8))
    del dataset[6:]
    with WorkerLoader(subset, 4, seed=0, **reader) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [2, 3, 4, 5]
        with pytest.raises(IndexError, match=r"index 6 .*list has 6 samples.*Subset\.indices"):
            next(batches)


def test_a_batch_without_indices_is_a_sentence_unless_collate_fn_takes_it(reader):
    batches = [[0, 1], [], [2]]
    with WorkerLoader(list(range(5)), batch_sampler=batches, seed=0, **reader) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(IndexError, match=r"batch 1 has no samples.*batch sampler"):
            next(iterator)
        assert next(iterator).tolist() == [2]
    with WorkerLoader(list(range(5)), batch_sampler=batches, seed=0, collate_fn=list, **reader) as loader:
        assert list(loader) == batches


class Modulo:
    """Takes indices that its length does not have."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == 12:
            raise KeyError("mine")  # which is no matter of the index
        return index % 5


def test_a_dataset_that_takes_other_indices_is_asked_for_them(reader):
    with WorkerLoader(Modulo(), 2, sampler=[7, 10**9], seed=0, **reader) as loader:
        assert next(iter(loader)).tolist() == [2, 0]
    with WorkerLoader(Modulo(), 2, sampler=[12], seed=0, **reader) as loader, pytest.raises(IndexError, match="mine"):
        list(loader)
    with WorkerLoader({"a": 1, "b": 2}, 2, sampler=["a", "b", "c"], seed=0, **reader) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [1, 2]
        with pytest.raises(KeyError):
            next(batches)


def test_without_a_seed_the_error_is_the_datasets_as_under_torch():
    with pytest.raises(IndexError, match="list index out of range"):
        list(WorkerLoader(list(range(5)), 2, sampler=[0, 9], num_workers=1))
