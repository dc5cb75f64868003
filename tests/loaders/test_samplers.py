"""A user's sampler is told the epoch, read once an epoch and as it is needed, never written to, and taken as it is."""

import json
import random
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from example_datasets import Numbers, Written, contents, rows
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler

from loaders import Preloader, ResidentLoader, TorchLoader, WorkerLoader

LENGTH, BATCH_SIZE = 24, 4
KINDS = {
    "inline": partial(WorkerLoader, persistent_workers=True),
    "processes": partial(WorkerLoader, num_workers=2, persistent_workers=True),
    "threads": partial(WorkerLoader, num_workers=2, persistent_workers=True, worker_method="thread"),
    "torch": partial(TorchLoader, num_workers=1),
    "resident": ResidentLoader,
    "preloader": lambda *args, **given: Preloader(KINDS["processes"](*args, **given), "cpu", 2),
}
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def over(kind, sampler, dataset=None, as_batches: bool = False, **settings):
    """A loader over a sampler, or over a batch sampler of it."""
    given = {"batch_sampler": BatchSampler(sampler, BATCH_SIZE, False)} if as_batches else {"sampler": sampler}
    size = 1 if as_batches else BATCH_SIZE
    return kind(Numbers(LENGTH) if dataset is None else dataset, size, seed=0, **given, **settings)


def distributed() -> DistributedSampler:
    return DistributedSampler(range(LENGTH), num_replicas=2, rank=1, seed=3)


def distributed_order(epoch: int) -> list[int]:
    sampler = distributed()
    sampler.set_epoch(epoch)
    return list(sampler)


# Epochs


@EVERY
@pytest.mark.parametrize("as_batches", [False, True])
def test_set_epoch_reaches_the_given_sampler_and_a_resume_gives_it_its_epoch_back(kind, as_batches):
    sampler = distributed()
    with over(kind, sampler, as_batches=as_batches) as loader:
        for epoch in (0, 1, 5, 5, 2):
            loader.set_epoch(epoch)
            assert sampler.epoch == epoch
            assert rows(loader) == distributed_order(epoch)
        loader.set_epoch(3)
        iterator = iter(loader)
        next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = contents(iterator)
    with over(kind, distributed(), as_batches=as_batches) as resumed:
        resumed.load_state_dict(state)
        assert contents(resumed) == rest == contents([distributed_order(3)[4:8], distributed_order(3)[8:]])


class Nested(Numbers):
    """A sampler that holds another one, and itself."""

    def __init__(self, inner) -> None:
        super().__init__(LENGTH)
        self.sampler, self.myself, self.epochs = inner, self, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_a_sampler_and_those_inside_it_are_told_the_epoch_that_runs():
    sampler = distributed()
    with over(KINDS["inline"], sampler) as loader:
        assert [rows(loader) for _ in range(3)] == [distributed_order(epoch) for epoch in range(3)]
    sampler.epoch = 0
    assert vars(sampler) == vars(distributed()), "nothing was written to it"
    innermost = Nested(None)
    innermost.sampler = innermost
    outer = Nested(SimpleNamespace(sampler=Nested(innermost)))
    with over(KINDS["inline"], outer) as loader:
        loader.set_epoch(3)
    assert [sampler.epochs for sampler in (outer, outer.sampler.sampler, innermost)] == [[3]] * 3


class Counting(Numbers):
    """A sampler that counts how often it is iterated; its length may change."""

    count = 0

    def __iter__(self):
        self.count += 1
        return iter(range(self.length))


@EVERY
def test_a_sampler_is_iterated_once_an_epoch_and_looked_at_anew_in_the_next_one(kind):
    sampler = Counting(LENGTH)
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


class Made(Numbers):
    """A sampler that gives what a function makes anew for each epoch; it has a length, whatever that is."""

    def __init__(self, make) -> None:
        super().__init__(LENGTH)
        self.make = make

    def __iter__(self):
        return iter(self.make())


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
@pytest.mark.parametrize("kind", [KINDS["processes"], KINDS["threads"], KINDS["preloader"]])
def test_a_random_samplers_order_depends_on_seed_and_epoch_and_leaves_the_global_generators_alone(make, kind):
    def epochs(kind, seed: int) -> list:
        seed_globals(seed)
        with over(kind, make()) as loader:
            found = [[batch for batch in contents(loader) if draw_globals()] for _ in range(2)]
        drawn = draw_globals()
        seed_globals(seed)
        assert drawn == [draw_globals() for _ in range(2 * LENGTH // BATCH_SIZE + 1)][-1]
        return found

    first, second = epochs(kind, 1)
    assert epochs(KINDS["inline"], 2) == [first, second] and first != second
    with over(kind, make()) as loader, over(kind, make()) as resumed:
        loader.set_epoch(1)
        next(loader)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert contents(resumed) == second[1:]


OWN = {
    "RandomSampler": lambda: RandomSampler(range(LENGTH), generator=torch.Generator()),
    "in a batch sampler": lambda: BatchSampler(
        WeightedRandomSampler(torch.ones(LENGTH), LENGTH, generator=torch.Generator()), 1, False
    ),
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
@pytest.mark.parametrize("kind", [KINDS["processes"], KINDS["preloader"]])
def test_a_sampler_with_a_generator_of_its_own_has_no_state_and_the_error_says_why(make, kind):
    with over(kind, make(), dataset=Pairs()) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match="generator"):
                loader.state_dict()
            assert len(list(loader)) == LENGTH / BATCH_SIZE


class Pairs:
    """Takes an index, or a list with one."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int | list) -> int:
        return index[0] if isinstance(index, list) else index


# Samplers that are not as torch's are


class Refilling:
    """A batch sampler that fills the same list, or array, for each batch."""

    def __init__(self, batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return LENGTH // BATCH_SIZE

    def __iter__(self):
        for start in range(0, LENGTH, BATCH_SIZE):
            self.batch[:] = range(start, start + BATCH_SIZE)
            yield self.batch


@EVERY
@pytest.mark.parametrize("batch", [[], np.zeros(BATCH_SIZE, int)], ids=type)
def test_a_batch_sampler_may_fill_the_same_batch_again(kind, batch):
    with kind(Numbers(LENGTH), 1, batch_sampler=Refilling(batch), seed=0) as loader:
        assert rows(loader) == list(range(LENGTH))


WAYS = {
    "map": lambda: [map(int, batch) for batch in ((3, 1), (2,))],
    "generators": lambda: [(index for index in batch) for batch in ((3, 1), (2,))],
    "tuples": lambda: [(3, 1), (2,)],
    "tensors": lambda: [torch.tensor([3, 1]), torch.tensor([2])],
}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("dataset", [Numbers(9), Written(9)], ids=lambda dataset: type(dataset).__name__)
def test_batches_of_indices_may_be_anything_that_torch_iterates(make, seed, dataset):
    class Batches(list):
        def __iter__(self):
            return iter(make())

    with WorkerLoader(dataset, batch_sampler=Batches([0, 0]), num_workers=2, seed=seed) as loader:
        for _ in range(2):
            batches = [batch["index"] if isinstance(batch, dict) else batch for batch in loader]
            assert contents(batches) == [[3, 1], [2]]


class Named:
    """`__getitems__` gets what the sampler gave, whatever it is."""

    def __getitems__(self, indices) -> list[str]:
        return [f"{type(indices).__name__} {sorted(indices)}"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch", [{"rows": 1}, (2, 3), "ab", {4, 5}], ids=type)
def test_without_a_seed_getitems_gets_the_batch_as_the_sampler_made_it(batch, workers):
    with WorkerLoader(Named(), batch_sampler=[batch], num_workers=workers) as loader:
        assert list(loader) == [[f"{type(batch).__name__} {sorted(batch)}"]]


def endless():
    while True:
        yield from torch.randperm(LENGTH).tolist()


@pytest.mark.parametrize("as_batches", [False, True])
@pytest.mark.parametrize("kind", [KINDS["inline"], KINDS["processes"], KINDS["preloader"], KINDS["torch"]])
def test_an_endless_sampler_is_drawn_as_needed_and_resumed_past_its_length(kind, as_batches):
    def loader():
        return over(kind, Made(endless), as_batches=as_batches)

    with loader() as whole:
        iterator = iter(whole)
        if not as_batches and kind is not KINDS["torch"]:
            assert len(whole) == LENGTH / BATCH_SIZE
        first = contents(islice(iterator, 10))
        state = json.loads(json.dumps(whole.state_dict()))
        rest = contents(islice(iterator, 8))
    rounds = list(chain.from_iterable(first + rest))
    assert [sorted(rounds[at : at + LENGTH]) for at in (0, 24, 48)] == [list(range(LENGTH))] * 3
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert contents(islice(iter(resumed), 8)) == rest


class Failing:
    """Raises after six indices."""

    def __iter__(self):
        yield from range(6)
        raise ValueError("bad sampler")


@pytest.mark.parametrize("kind", [KINDS["inline"], KINDS["processes"], KINDS["threads"], KINDS["preloader"]])
@pytest.mark.parametrize("sampler", [Failing, lambda: Made(Failing().__iter__)], ids=["no length", "a length"])
def test_a_samplers_error_comes_in_its_place_and_ends_the_epoch(kind, sampler):
    seed_globals(4)
    with over(kind, sampler()) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="bad sampler"):
            next(iterator)
        with pytest.raises((StopIteration, RuntimeError, ValueError)):
            next(iterator)
        with pytest.raises(ValueError, match="bad sampler"):
            list(iter(loader))
    drawn = draw_globals()
    seed_globals(4)
    assert drawn == draw_globals(), "the global generators are as they were"


@pytest.mark.parametrize("kind", [KINDS["inline"], KINDS["torch"], KINDS["resident"]])
def test_a_sampler_is_shared_among_ranks_and_one_without_a_length_leaves_its_loader_without_one(kind):
    for rank, share in enumerate(([[9, 8], [1]], [[5, 4], [9]])):
        with kind(Numbers(LENGTH), 2, seed=0, sampler=[9, 8, 5, 4, 1], rank=rank, world_size=2) as part:
            assert contents(part) == share
    with kind(Numbers(LENGTH), 2, seed=0, sampler=iter([4, 2, 0])) as loader:
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        assert contents(iter(loader)) == [[4, 2], [0]]
    for settings in ({"shuffle": True}, {"batch_sampler": [[1, 2]]}):
        with pytest.raises(ValueError, match="sampler"):
            kind(Numbers(LENGTH), 2, seed=0, sampler=[1, 2], **settings)
