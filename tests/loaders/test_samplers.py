"""A user's sampler is told the epoch, read once an epoch and as it is needed, never written to, and taken as it is."""

import random
import signal
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from every_loader import LOADERS, saved
from example_datasets import Numbers, Written, contents, rows
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler

from loaders import WorkerLoader

LENGTH, BATCH_SIZE = 24, 4
KINDS = ("inline", "processes", "torch", "resident", "preloader")
AS_BATCHES = pytest.mark.parametrize("as_batches", [False, True])


def every(*names: str, but: str = ""):
    return pytest.mark.parametrize("kind", [name for name in names or KINDS if name != but])


def over(kind: str, sampler, as_batches: bool = False, batch_size: int = BATCH_SIZE, **settings):
    """A loader over a sampler, or over a batch sampler of it."""
    if as_batches:
        return LOADERS[kind].make(Numbers(LENGTH), 1, batch_sampler=BatchSampler(sampler, 4, False), seed=0)
    return LOADERS[kind].make(Numbers(LENGTH), batch_size, sampler=sampler, seed=0, **settings)


def distributed() -> DistributedSampler:
    return DistributedSampler(range(LENGTH), num_replicas=2, rank=1, seed=3)


def distributed_order(epoch: int) -> list[int]:
    sampler = distributed()
    sampler.set_epoch(epoch)
    return list(sampler)


class Made(Numbers):
    """A sampler that gives what a function makes for each epoch, and counts epochs; its length may be wrong."""

    def __init__(self, make) -> None:
        super().__init__(LENGTH)
        self.make, self.count = make, 0

    def __iter__(self):
        self.count += 1
        return iter(self.make())


# Epochs


@every()
@AS_BATCHES
def test_set_epoch_reaches_the_given_sampler_and_a_resume_gives_it_its_epoch_back(kind, as_batches):
    sampler = distributed()
    with over(kind, sampler, as_batches) as loader:
        assert [rows(loader) for _ in range(3)] == [distributed_order(epoch) for epoch in range(3)]
        for epoch in (5, 5, 2):
            loader.set_epoch(epoch)
            assert sampler.epoch == epoch
            assert rows(loader) == distributed_order(epoch)
        loader.set_epoch(3)
        next(iter(loader))
        state = saved(loader)
    sampler.epoch = 0
    assert vars(sampler) == vars(distributed()), "nothing was written to it"
    with over(kind, distributed(), as_batches) as resumed:
        resumed.load_state_dict(state)
        assert rows(resumed) == distributed_order(3)[4:]


class Nested(Numbers):
    """A sampler that holds another one, and itself."""

    def __init__(self, inner) -> None:
        super().__init__(LENGTH)
        self.sampler, self.myself, self.epochs = inner, self, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_samplers_inside_a_sampler_are_told_the_epoch():
    innermost = Nested(None)
    innermost.sampler = innermost
    outer = Nested(SimpleNamespace(sampler=Nested(innermost)))
    with over("inline", outer) as loader:
        loader.set_epoch(3)
    assert [sampler.epochs for sampler in (outer, outer.sampler.sampler, innermost)] == [[3]] * 3


@every()
def test_a_sampler_is_iterated_once_an_epoch_and_looked_at_anew_in_the_next_one(kind):
    sampler = Made(lambda: range(sampler.length))
    with over(kind, sampler) as loader:
        assert sampler.count == 0
        for epoch in (1, 2, 3):
            iterator = iter(loader)
            next(iterator)
            if epoch != 2:  # that one is broken off
                contents(iterator)
            assert sampler.count == epoch
        for length in (16, 8, LENGTH):
            sampler.length = length
            assert len(loader) == length / BATCH_SIZE
            assert rows(loader) == list(range(length))


# Random samplers

RANDOM = {
    "RandomSampler": lambda: RandomSampler(range(LENGTH)),
    "WeightedRandomSampler": lambda: WeightedRandomSampler(torch.ones(LENGTH), LENGTH),
    "numpy": lambda: Made(lambda: (int(np.random.randint(LENGTH)) for _ in range(LENGTH))),
    "python": lambda: Made(lambda: (random.randrange(LENGTH) for _ in range(LENGTH))),
}


def seed_globals(seed: int) -> None:
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)


def draw_globals() -> list[float]:
    return [torch.rand(()).item(), np.random.random(), random.random()]


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
@every("processes")
def test_a_random_samplers_order_depends_on_seed_and_epoch_and_leaves_the_global_generators_alone(make, kind):
    def epochs(kind: str, seed: int) -> list:
        seed_globals(seed)
        with over(kind, make()) as loader:
            found = [[batch for batch in contents(loader) if draw_globals()] for _ in range(2)]
        drawn = draw_globals()
        seed_globals(seed)
        assert drawn == [draw_globals() for _ in range(2 * LENGTH // BATCH_SIZE + 1)][-1]
        return found

    first, second = epochs(kind, 1)
    assert epochs("inline", 2) == [first, second] and first != second
    with over(kind, make()) as loader, over(kind, make()) as resumed:
        loader.set_epoch(1)
        next(loader)
        resumed.load_state_dict(saved(loader))
        assert contents(resumed) == second[1:]


@AS_BATCHES
def test_a_long_epoch_is_drawn_in_blocks_which_the_loops_own_draws_do_not_disturb(as_batches):
    length = 150 if as_batches else 4200  # more than a block

    def indices(draws: bool) -> list[int]:
        made = ([int(np.random.randint(9))] for _ in range(length))
        given = {"batch_sampler": made} if as_batches else {"sampler": (row for (row,) in made), "batch_size": 50}
        with WorkerLoader(Numbers(9), seed=0, **given) as loader:
            return rows(batch for batch in loader if not draws or draw_globals())

    calm = indices(draws=False)
    assert indices(draws=True) == calm and len(calm) == length
    assert calm[:64] != calm[64:128]


@AS_BATCHES
@every("processes", "preloader")
def test_a_sampler_with_a_generator_of_its_own_has_no_state_and_the_error_says_why(kind, as_batches):
    with over(kind, RandomSampler(range(LENGTH), generator=torch.Generator()), as_batches) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match="generator"):
                loader.state_dict()
            assert sorted(rows(loader)) == list(range(LENGTH))


# Samplers that are not as torch's are


def refilled(batch):
    """Fills the same list, or array, for each batch."""
    for start in range(0, LENGTH, BATCH_SIZE):
        batch[:] = range(start, start + BATCH_SIZE)
        yield batch


@every()
@pytest.mark.parametrize("batch", [[], np.zeros(BATCH_SIZE, int)], ids=type)
def test_a_batch_sampler_may_fill_the_same_batch_again(kind, batch):
    with LOADERS[kind].make(Numbers(LENGTH), 1, batch_sampler=Made(lambda: refilled(batch)), seed=0) as loader:
        assert rows(loader) == list(range(LENGTH))


class Restarting(BatchSampler):
    """Is its own iterator, and iter() makes it begin anew, as in Lightning's wrapper."""

    def __iter__(self):
        self.items = super().__iter__()
        return self

    def __next__(self):
        return next(self.items)


@pytest.mark.parametrize("seed", [None, 0])
def test_an_iterator_of_a_batch_sampler_is_not_iterated_again(seed):
    batches = Restarting(range(400), 1, False)
    with WorkerLoader(Numbers(400), batch_sampler=batches, num_workers=1, seed=seed) as loader:
        assert rows(loader) == list(range(400))


WAYS = {
    "map": lambda: [map(int, batch) for batch in ((3, 1), (2,))],
    "generators": lambda: [(index for index in batch) for batch in ((3, 1), (2,))],
    "tuples": lambda: [(3, 1), (2,)],
    "tensors": lambda: [torch.tensor([3, 1]), torch.tensor([2])],
}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("dataset", "seed"), [(Numbers(9), None), (Written(9), 0)], ids=["unseeded", "seeded"])
def test_batches_of_indices_may_be_anything_that_torch_iterates(make, seed, dataset):
    with WorkerLoader(dataset, batch_sampler=Made(make), num_workers=2, seed=seed) as loader:
        for _ in range(2):
            batches = [batch["index"] if isinstance(batch, dict) else batch for batch in loader]
            assert contents(batches) == [[3, 1], [2]]


class Named(Numbers):
    """`__getitems__` gets what the sampler gave, whatever it is."""

    __getitem__ = None

    def __getitems__(self, indices) -> list[str]:
        return [f"{type(indices).__name__} {sorted(indices)}"]


@pytest.mark.parametrize(("workers", "seed"), [(0, 0), (1, None), (1, 0)])
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
            with pytest.raises((StopIteration, RuntimeError, ValueError)):
                next(iterator)
    drawn = draw_globals()
    seed_globals(4)
    assert drawn == draw_globals(), "the global generators are as they were"


def alarmed(at: int) -> Made:
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
def test_an_alarm_while_a_sampler_draws_is_raised_and_no_batch_is_lost(kind, at):
    def expire(*_) -> None:
        raise TimeoutError

    with over(kind, alarmed(-1), batch_size=50) as calm:
        expected = contents(calm)
    before, iterator, seen, alarms = signal.signal(signal.SIGALRM, expire), None, [], 0
    try:
        with over(kind, alarmed(at), batch_size=50) as loader:
            while len(seen) < len(expected):
                try:
                    iterator = iterator or iter(loader)
                    seen.append(next(iterator).tolist())
                except TimeoutError:
                    alarms += 1
    finally:
        signal.signal(signal.SIGALRM, before)
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
