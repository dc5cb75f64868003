"""Samplers that users pass in: told the epoch, read once an epoch in blocks, seeded, and resumed."""

import random
import threading
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from every_loader import saved
from example_datasets import Numbers, contents, rows
from example_samplers import AS_BATCHES, BATCH_SIZE, LENGTH, Made, draw_globals, every, over, seed_globals
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from loaders import Preloader, RolloverBatches, SeededLoader, WorkerLoader
from loaders.errors import warn_once


def distributed():
    return DistributedSampler(range(LENGTH), num_replicas=2, rank=1, seed=3)


def distributed_order(epoch):
    sampler = distributed()
    sampler.set_epoch(epoch)
    return list(sampler)


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


@every()
@AS_BATCHES
def test_an_epoch_may_be_named_to_a_sampler_of_the_program_as_with_torchs_loader(kind, as_batches):
    sampler = distributed()
    with over(kind, sampler, as_batches) as loader:
        for epoch in (2, 0, 3):
            sampler.set_epoch(epoch)
            assert rows(loader) == distributed_order(epoch)
        assert rows(loader) == distributed_order(4), "it counts on"


@every()
def test_an_epoch_may_be_named_to_the_loaders_own_sampler_as_to_any(kind):
    with over(kind, None, shuffle=True) as loader:
        epochs = [rows(loader) for _ in range(4)]
        sampler = getattr(loader, "loader", loader).sampler
        for epoch in (2, 1, 2):
            sampler.set_epoch(epoch)
            assert rows(loader) == epochs[epoch]
            sampler.set_epoch(epoch)  # again, as Lightning calls it
        assert rows(loader) == epochs[3], "it counts on"
        sampler.set_epoch(3)
        loader.set_epoch(2)
        iterator = iter(loader)
        first = next(iterator)
        state = saved(loader)
        assert [*rows([first]), *rows(iterator)] == epochs[2]
        loader.load_state_dict(state)
        sampler.set_epoch(2)  # of the state: it goes on within it
        rest = rows(loader)
        assert rest == epochs[2][-len(rest) :] and 0 < len(rest) < len(epochs[2])
        loader.load_state_dict(state)
        sampler.set_epoch(0)
        assert rows(loader) == epochs[0]
        with pytest.raises(ValueError, match="integer from 0"):
            sampler.set_epoch(-1)


@AS_BATCHES
def test_a_resume_within_an_epoch_says_if_the_sampler_has_another_length_in_that_epoch(as_batches, caplog):
    with over("inline", RandomSampler(range(LENGTH)), as_batches) as loader:
        next(iter(loader))
        states = [loader.state_dict()]
        list(loader), list(loader)
        states.append(loader.state_dict())
    rollover = WorkerLoader(Numbers(10), batch_sampler=RolloverBatches(10, 4), seed=0)
    rollover.set_epoch(1)
    next(iter(rollover))
    saved_rollover = rollover.state_dict()
    resumed = WorkerLoader(Numbers(10), batch_sampler=RolloverBatches(10, 4), seed=0)
    resumed.load_state_dict(saved_rollover)
    assert (saved_rollover["sampler_length"], len(RolloverBatches(10, 4))) == (3, 2)
    for length, warns in ((LENGTH, 0), (16, 1)):
        with over("inline", RandomSampler(range(LENGTH), num_samples=length), as_batches) as loader:
            for state in states:
                loader.load_state_dict(state)
        assert len([text for text in caplog.messages if "items" in text]) == warns


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1, "persistent_workers": True}])
def test_a_batch_sampler_that_takes_the_place_of_the_loaders_own_is_refused_with_a_seed(options):
    """Ultralytics' InfiniteDataLoader and timm's MultiEpochsDataLoader have one that never ends."""
    with SeededLoader(Numbers(10), 4, seed=0, **options) as loader:
        object.__setattr__(loader, "batch_sampler", cycle([[0]]))
        with pytest.raises(ValueError, match="batch_sampler was replaced, by a cycle"):
            iter(loader)


@pytest.mark.parametrize("settings", [{"shuffle": True}, {"sampler": np.arange(10)}, {"sampler": torch.arange(10)}])
@pytest.mark.parametrize(("name", "value"), [("batch_size", 2), ("drop_last", True), ("sampler", [0, 1])])
def test_a_change_of_the_loaders_own_batch_sampler_is_refused_with_a_seed(name, value, settings):
    with SeededLoader(Numbers(10), 4, seed=0, **settings) as loader:
        next(iter(loader))
        setattr(loader.batch_sampler, name, value)
        with pytest.raises(ValueError, match=f"batch_sampler.{name} was changed.*make a new loader"):
            iter(loader)


def test_nothing_to_shuffle_is_an_error_as_with_torchs_sampler():
    dataset = []
    with WorkerLoader(dataset, 2, shuffle=True, seed=0) as loader:
        with pytest.raises(ValueError, match="list has no samples to shuffle"):
            iter(loader)
        dataset += range(4)
        assert len(list(loader)) == 2
    assert list(WorkerLoader([], 2, seed=0)) == []


def test_a_new_length_of_the_dataset_is_said_without_a_claim_about_the_samplers(caplog):
    dataset = Numbers(10)
    with WorkerLoader(dataset, 4, sampler=[1, 2], seed=0, num_workers=1, persistent_workers=True) as loader:
        assert rows(loader) == [1, 2]
        dataset.length = 20
        assert rows(loader) == [1, 2]
    (said,) = [text for text in caplog.messages if "samples" in text]
    assert "10" in said and "20" in said and "uses" not in said


class Nested(Numbers):
    """A sampler that holds another one, and itself."""

    def __init__(self, inner):
        super().__init__(LENGTH)
        self.sampler = inner
        self.myself = self
        self.epochs = []

    def set_epoch(self, epoch):
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


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
@every("processes")
def test_a_random_samplers_order_depends_on_seed_and_epoch_and_leaves_the_global_generators_alone(make, kind):
    def epochs(kind, seed):
        seed_globals(seed)
        with over(kind, make()) as loader:
            shuffled = [[batch for batch in contents(loader) if draw_globals()] for _ in range(2)]
        drawn = draw_globals()
        seed_globals(seed)
        assert drawn == [draw_globals() for _ in range(2 * LENGTH // BATCH_SIZE + 1)][-1]
        return shuffled

    first, second = epochs(kind, 1)
    assert epochs("inline", 2) == [first, second] and first != second
    with over(kind, make()) as loader, over(kind, make()) as resumed:
        loader.set_epoch(1)
        next(loader)
        resumed.load_state_dict(saved(loader))
        assert contents(resumed) == second[1:]


@AS_BATCHES
def test_a_long_epoch_is_drawn_in_blocks_in_the_loops_thread_whose_own_draws_do_not_disturb_it(as_batches, seed):
    length = 150 if as_batches else 4200  # more than a block

    def indices(draws):
        made = ([int(np.random.randint(9))] for _ in range(length) if threads.add(threading.get_ident()) is None)
        arguments = {"batch_sampler": made} if as_batches else {"sampler": (row for (row,) in made), "batch_size": 50}
        seed_globals(1)
        with Preloader(WorkerLoader(Numbers(9), num_workers=1, seed=seed, **arguments), "cpu") as loader:
            return rows(batch for batch in loader if not draws or draw_globals())

    threads = set()
    calm = indices(draws=seed is None)
    assert indices(draws=True) == calm and len(calm) == length
    assert threads == {threading.get_ident()}
    assert calm[:64] != calm[64:128]


@AS_BATCHES
@every("processes", "preloader")
def test_a_sampler_with_a_generator_of_its_own_has_no_state_and_the_error_says_why(kind, as_batches):
    with over(kind, RandomSampler(range(LENGTH), generator=torch.Generator()), as_batches) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"generator.* make it in __iter__"):
                loader.state_dict()
            assert sorted(rows(loader)) == list(range(LENGTH))


class Counting(Numbers):
    """A sampler that knows by itself which epoch it is in; `keeps` does it."""

    def __init__(self, keeps):
        super().__init__(LENGTH)
        self.epoch = 0
        self.rows = list(range(LENGTH))
        self.last = None
        self.keeps = keeps

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(LENGTH).tolist()
        self.keeps(self)
        return iter(order)


def test_an_iterator_as_a_sampler_is_said_to_be_read_only_once(caplog):
    warn_once.cache_clear()
    with over("inline", iter(map(int, range(8)))) as loader:
        assert rows(loader) == list(range(8))
        assert rows(loader) == []
    assert len([text for text in caplog.messages if "map" in text and "once" in text]) == 1


class Endless(Counting):
    def __init__(self, keeps):
        super().__init__(keeps)
        self.endless = cycle(range(3))


class Parts(Counting):
    def __init__(self, keeps):
        super().__init__(keeps)
        self.parts = [cycle(range(3)), 5]


class Told(Counting):
    def set_epoch(self, epoch):
        self.epoch = epoch


def count_epochs(sampler):
    sampler.epoch += 1


KEEPS = {
    "number": (Counting, count_epochs, "Counting.epoch"),
    "in place": (Counting, lambda sampler: random.shuffle(sampler.rows), "Counting.rows"),
    "made anew": (Counting, lambda sampler: setattr(sampler, "last", [*sampler.rows]), None),
    "iterator": (Endless, lambda sampler: next(sampler.endless), "Endless.endless"),
    "iterator in a list": (Parts, lambda sampler: next(sampler.parts[0]), "Parts.parts"),
    "iterator made anew": (Counting, lambda sampler: setattr(sampler, "last", iter(sampler.rows)), None),
    "told": (Told, count_epochs, None),
}


@AS_BATCHES
@every("processes", "preloader")
@pytest.mark.parametrize(("sampler", "keeps", "named"), KEEPS.values(), ids=KEEPS)
def test_a_sampler_whose_own_count_no_state_has_is_named_once(sampler, keeps, named, kind, as_batches, caplog):
    warn_once.cache_clear()
    with over(kind, sampler(keeps), as_batches) as loader:
        for _ in range(3):
            contents(loader)
    said = [text for text in caplog.messages if "set_epoch(epoch)" in text]
    assert len(said) == (named is not None) and all(named in text for text in said)
