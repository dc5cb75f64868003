"""A user's sampler is told the epoch, iterated once when its epoch begins, and never written to."""

import json
import random
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from example_datasets import Numbers, contents, rows
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler

from loaders import Preloader, ResidentLoader, TorchLoader, WorkerLoader

LENGTH, BATCH_SIZE = 24, 4

# How a user hands a sampler over.
GIVEN = {
    "sampler": lambda sampler: {"sampler": sampler, "batch_size": BATCH_SIZE},
    "batch_sampler": lambda sampler: {"batch_sampler": BatchSampler(sampler, BATCH_SIZE, drop_last=False)},
}


# A sampler is iterated where the loader is used, and the order is read alike however it was made: not every way of
# handing one over is tried with every kind of worker.
PAIRS = {
    "sampler-inline": (GIVEN["sampler"], {"num_workers": 0}),
    "batch_sampler-inline": (GIVEN["batch_sampler"], {"num_workers": 0}),
    "batch_sampler-processes": (GIVEN["batch_sampler"], {"num_workers": 2}),
    "sampler-threads": (GIVEN["sampler"], {"num_workers": 2, "worker_method": "thread"}),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"given", "reader"} <= set(metafunc.fixturenames):
        # Random samplers are compared with what is read inline.
        pairs = [name for name in PAIRS if not ("random_sampler" in metafunc.fixturenames and "inline" in name)]
        metafunc.parametrize(("given", "reader"), [PAIRS[name] for name in pairs], ids=pairs)
    elif "given" in metafunc.fixturenames:
        metafunc.parametrize("given", GIVEN.values(), ids=GIVEN)


def seeded(dataset=None, **settings) -> WorkerLoader:
    dataset = Numbers(LENGTH) if dataset is None else dataset
    if "batch_sampler" not in settings:
        settings = {"batch_size": BATCH_SIZE, **settings}
    return WorkerLoader(dataset, **{"seed": 0, "persistent_workers": True, **settings})


def distributed() -> DistributedSampler:
    return DistributedSampler(range(LENGTH), num_replicas=2, rank=1, seed=3)


def distributed_order(epoch: int) -> list[int]:
    sampler = distributed()
    sampler.set_epoch(epoch)
    return list(sampler)


# Epochs


def alone(loader):
    return loader


OVER = pytest.mark.parametrize("over", [alone, lambda loader: Preloader(loader, "cpu", 2)], ids=["", "preloader"])


@OVER
def test_set_epoch_reaches_the_given_sampler_at_once(given, reader, over):
    sampler = distributed()
    with over(seeded(**given(sampler), **reader)) as loader:
        for epoch in (0, 1, 5, 5, 2):
            loader.set_epoch(epoch)
            assert sampler.epoch == epoch
            assert rows(loader) == distributed_order(epoch)


class Nested(Numbers):
    """A sampler that holds another one, and itself."""

    def __init__(self, inner) -> None:
        super().__init__(LENGTH)
        self.sampler, self.myself, self.epochs = inner, self, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_only_set_epoch_tells_a_sampler_its_epoch_and_samplers_inside_it_once():
    untold = distributed()
    with seeded(sampler=untold) as loader:  # no loader moves it to another epoch
        assert [rows(loader) for _ in range(3)] == [distributed_order(0)] * 3
    assert vars(untold) == vars(distributed())
    innermost = Nested(None)
    innermost.sampler = innermost
    outer = Nested(SimpleNamespace(sampler=Nested(innermost)))
    with seeded(sampler=outer) as loader:
        loader.set_epoch(3)
        loader.state_dict()  # which looks for generators in them
        innermost.dice = random.Random()
        with pytest.raises(ValueError, match=r"Nested\.dice"):
            loader.state_dict()
    assert [sampler.epochs for sampler in (outer, outer.sampler.sampler, innermost)] == [[3]] * 3


class Counting(Numbers):
    """A sampler that counts how often it is iterated."""

    count = 0

    def __iter__(self):
        self.count += 1
        return iter(range(LENGTH))


def test_a_sampler_is_iterated_once_an_epoch_and_not_before_it_begins(given, reader):
    sampler = Counting(LENGTH)
    with seeded(**given(sampler), **reader) as loader:
        assert sampler.count == 0
        for epoch in (1, 2, 3):
            iterator = iter(loader)
            next(iterator)
            assert sampler.count == epoch
            if epoch != 2:  # that one is broken off
                contents(iterator)
            assert sampler.count == epoch


@OVER
def test_a_sampler_changed_between_epochs_gives_the_new_order_in_the_next_one(given, reader, over):
    def only(index: int) -> torch.Tensor:
        return torch.eye(LENGTH, dtype=torch.float64)[index]

    sampler = WeightedRandomSampler(only(0), LENGTH)
    with over(seeded(**given(sampler), **reader)) as loader:
        for index in (0, 5, 7):
            sampler.weights = only(index)
            assert rows(loader) == [index] * LENGTH


# Random samplers


class Made(Numbers):
    """A sampler that gives what a function makes anew for each epoch; it has a length, whatever that is."""

    def __init__(self, make) -> None:
        super().__init__(LENGTH)
        self.make = make

    def __iter__(self):
        return iter(self.make())


def drawn(draw) -> Made:
    """A sampler that draws each index when it is asked for it."""
    return Made(lambda: (draw() for _ in range(LENGTH)))


RANDOM = {
    "RandomSampler": lambda: RandomSampler(range(LENGTH)),
    "WeightedRandomSampler": lambda: WeightedRandomSampler(torch.ones(LENGTH), LENGTH),
    "torch": lambda: drawn(lambda: torch.randint(LENGTH, ()).item()),
    "numpy": lambda: drawn(lambda: int(np.random.randint(LENGTH))),
    "python": lambda: drawn(lambda: random.randrange(LENGTH)),
}


@pytest.fixture(params=RANDOM.values(), ids=RANDOM)
def random_sampler(request):
    """Makes a sampler that draws from one of the global generators."""
    return request.param


def seed_globals(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def draw_globals() -> list[float]:
    return [torch.rand(()).item(), np.random.random(), random.random()]


def two_epochs_among_draws(loader, seed: int) -> tuple[list, list]:
    """Two epochs of a loader, and what a training loop draws from the global generators at each step."""
    seed_globals(seed)
    epochs, drawn = [], []
    with loader:
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(batch.tolist())
                drawn.append(draw_globals())
    return epochs, drawn


def test_a_random_samplers_order_depends_on_seed_and_epoch_and_leaves_global_generators_alone_after_a_resume_too(
    random_sampler, given, reader
):
    epochs, drawn = two_epochs_among_draws(seeded(**given(random_sampler()), **reader), 1)
    inline, drawn_inline = two_epochs_among_draws(seeded(**given(random_sampler()), num_workers=0), 2)
    assert epochs == inline
    assert epochs[0] != epochs[1]
    assert epochs != two_epochs_among_draws(seeded(**given(random_sampler()), seed=9), 1)[0]
    for seed, draws in ((1, drawn), (2, drawn_inline)):
        seed_globals(seed)
        assert draws == [draw_globals() for _ in draws]
    with seeded(**given(random_sampler()), **reader) as loader, seeded(**given(random_sampler()), **reader) as resumed:
        loader.set_epoch(1)
        next(loader)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert contents(resumed) == epochs[1][1:]


@pytest.mark.parametrize("named", [3, None], ids=lambda named: f"set_epoch-{named}")
def test_a_resume_gives_a_sampler_its_epoch_back_if_set_epoch_named_one(named, given, reader):
    with seeded(**given(distributed()), **reader) as loader:
        rows(loader)
        if named is not None:
            loader.set_epoch(named)
        iterator = iter(loader)
        next(iterator)
        loader.set_epoch(9)  # of the next one: this one's order has been drawn
        state = json.loads(json.dumps(loader.state_dict()))
        rest = contents(iterator)
    with seeded(**given(distributed()), **reader) as resumed, Preloader(resumed, "cpu", 1) as outer:
        outer.load_state_dict(state)
        assert contents(outer) == rest
        assert rows(outer) == distributed_order(named or 0)


class OwnGenerator(Numbers):
    """A sampler that shuffles with a generator of its own."""

    def __init__(self, generator) -> None:
        super().__init__(LENGTH)
        self._generator = generator

    def __iter__(self):
        order = list(range(LENGTH))
        self._generator.shuffle(order)
        return iter(order)


OWN_GENERATORS = {
    "RandomSampler": lambda: RandomSampler(range(LENGTH), generator=torch.Generator()),
    "WeightedRandomSampler": lambda: WeightedRandomSampler(torch.ones(LENGTH), LENGTH, generator=torch.Generator()),
    "numpy": lambda: OwnGenerator(np.random.default_rng(0)),
    "python": lambda: OwnGenerator(random.Random(0)),
}


@pytest.mark.parametrize("make", OWN_GENERATORS.values(), ids=OWN_GENERATORS)
def test_a_sampler_with_a_generator_of_its_own_has_no_state_and_the_error_says_why(make, given):
    with seeded(**given(make()), num_workers=1) as loader:
        with pytest.raises(ValueError, match=r"(?i)generator|random\.Random"):
            loader.state_dict()
        assert len(rows(loader)) == LENGTH
        with pytest.raises(ValueError, match=r"(?i)generator|random\.Random"):
            loader.state_dict()
        with Preloader(loader, "cpu", 2) as preloader:
            assert len(rows(preloader)) == LENGTH
            with pytest.raises(ValueError, match=r"(?i)generator|random\.Random"):
                preloader.state_dict()


# Indices of all kinds, and no length


class Cells:
    """A sample for each (row, column)."""

    def __getitem__(self, index: tuple) -> list:
        row, column = index
        return [row, float(column), random.random(), np.random.random(), torch.rand(()).item()]


@pytest.mark.parametrize("kind", [int, str])
def test_indices_may_be_tuples(kind, given, reader):
    cells = [(row, kind(column)) for row in range(5) for column in range(3)]
    with seeded(Cells(), **given(cells), **reader) as loader:
        batches = [list(zip(*batch, strict=True)) for batch in loader]
    read = list(chain.from_iterable(batches))
    assert [(row, kind(int(column))) for row, column, *_ in read] == cells
    if reader.get("worker_method") != "thread":  # threads seed no global generator
        with seeded(Cells(), **given(cells), num_workers=1) as other:
            assert [list(zip(*batch, strict=True)) for batch in other] == batches
        assert len({draws for _, _, *draws in map(tuple, read) for draws in draws}) == 3 * len(cells)


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


@pytest.mark.parametrize("batch", [[], np.zeros(BATCH_SIZE, int)], ids=type)
@pytest.mark.parametrize("seed", [None, 0])
def test_a_batch_sampler_may_fill_the_same_batch_again(batch, seed, reader):
    with seeded(batch_sampler=Refilling(batch), seed=seed, persistent_workers=False, **reader) as loader:
        assert rows(loader) == list(range(LENGTH))


def endless():
    while True:
        yield from torch.randperm(LENGTH).tolist()


def test_an_endless_sampler_with_a_length_is_drawn_from_as_needed(given, reader):
    def five_rounds(**reader) -> list:
        with seeded(**given(Made(endless)), **reader) as loader:
            return list(islice(iter(loader), 5 * LENGTH // BATCH_SIZE))

    torch.manual_seed(5)
    batches = five_rounds(**reader)
    assert torch.initial_seed() == 5 and torch.equal(torch.rand(3), torch.manual_seed(5) and torch.rand(3))
    samples = torch.cat(batches).tolist()
    rounds = [samples[start : start + LENGTH] for start in range(0, 5 * LENGTH, LENGTH)]
    assert [sorted(samples) for samples in rounds] == [list(range(LENGTH))] * 5
    assert len(set(map(tuple, rounds))) == 5
    assert torch.equal(torch.stack(batches), torch.stack(five_rounds(num_workers=1)))


# Lengths


class Growing(Numbers):
    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_samplers_new_length_counts_from_the_next_epoch_on(rank, reader):
    sampler = Growing(16)
    with seeded(sampler=sampler, rank=rank, world_size=2, **reader) as loader:
        assert len(loader) == len(rows(loader)) / BATCH_SIZE == 2
        for length in (LENGTH, 8):
            sampler.length = length
            assert len(loader) == length / BATCH_SIZE / 2
            expected = [row for row in range(length) if row // BATCH_SIZE % 2 == rank]
            read, unfinished = [], []
            for batch in loader:
                read += batch.tolist()
                unfinished.append(loader.state_dict()["samples"])
            assert read == expected
            assert unfinished == [*range(8, length, 8), 0]


# Samplers of every loader

EVERY = pytest.mark.parametrize("make", [WorkerLoader, TorchLoader, ResidentLoader])
WITH_WORKERS = [partial(kind, num_workers=1) for kind in (WorkerLoader, TorchLoader)]


class Failing:
    """Raises after six indices."""

    def __iter__(self):
        yield from range(6)
        raise ValueError("bad sampler")


@pytest.mark.parametrize("make", [WorkerLoader, TorchLoader, ResidentLoader, *WITH_WORKERS])
@pytest.mark.parametrize(
    "sampler", [Failing, lambda: Made(Failing().__iter__)], ids=["without a length", "with a length"]
)
def test_a_samplers_error_comes_in_its_place_and_ends_the_epoch(make, sampler):
    seed_globals(4)
    with make(Numbers(LENGTH), BATCH_SIZE, seed=0, sampler=sampler()) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="bad sampler"):
            next(iterator)
        assert contents(iterator) == []
        with pytest.raises(ValueError, match="bad sampler"):
            list(loader)
    drawn = draw_globals()
    seed_globals(4)
    assert drawn == draw_globals(), "the global generators are as they were"


@EVERY
def test_a_sampler_is_shared_among_ranks_and_one_without_a_length_leaves_its_loader_without_one(make):
    given = {"seed": 0, "batch_size": 2, "world_size": 2}
    parts = [make(Numbers(LENGTH), sampler=[9, 8, 5, 4, 1], rank=rank, **given) for rank in (0, 1)]
    assert [contents(part) for part in parts] == [[[9, 8], [1]], [[5, 4], [9]]]
    assert contents(make(Numbers(LENGTH), 1, seed=0, batch_sampler=[])) == []
    with make(Numbers(LENGTH), 2, seed=0, sampler=iter([4, 2, 0])) as loader:
        with pytest.raises(TypeError, match="the sampler has no length, so the loader has none either"):
            len(loader)
        iterator = iter(loader)
        assert contents(iterator) == [[4, 2], [0]]
        with pytest.raises(TypeError, match="no length"):
            len(iterator)


@EVERY
def test_arguments_that_a_sampler_excludes_are_refused(make):
    for settings in ({"shuffle": True}, {"last_batch": "rollover"}, {"batch_sampler": [[1, 2]]}):
        with pytest.raises(ValueError, match="sampler"):
            make(Numbers(LENGTH), 2, seed=0, sampler=[1, 2], **settings)
