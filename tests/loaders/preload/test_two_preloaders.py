"""One loader has one consumer: a newer one ends the epoch of the Preloader before, whose thread leaves the loader."""

import pytest
from every_loader import ordered
from example_datasets import Numbers, contents

from loaders import Preloader, WorkerLoader

ROWS = 24


def workers(persists=True):
    settings = {"num_workers": 2, "prefetch_factor": 1, "persistent_workers": persists}
    return WorkerLoader(Numbers(ROWS), 2, shuffle=True, seed=3, **settings)


def epoch(number):
    return ordered(number, ROWS, 2, seed=3)


@pytest.mark.parametrize("newer", ["a Preloader", "a Preloader without a thread", "the loader"])
def test_a_newer_consumer_ends_the_epoch_of_a_preloader_and_gets_its_own_batches(newer):
    with workers() as loader:
        for number in range(0, 8, 2):
            older = iter(Preloader(loader, "cpu", 2))
            first = next(older).tolist()
            later = loader if newer == "the loader" else Preloader(loader, "cpu", 0 if "without" in newer else 2)
            assert contents(later) == epoch(number + 1)
            assert first == epoch(number)[0]
            with pytest.raises(RuntimeError, match=r"a newer iter\(\)"):
                next(older)


def test_a_preloader_whose_epoch_another_has_ended_knows_its_state_and_begins_anew():
    with workers() as loader:
        older = Preloader(loader, "cpu", 2)
        next(older)
        state = older.state_dict()
        newer = Preloader(loader, "cpu", 2)
        next(newer)
        assert older.state_dict() == state
        older.load_state_dict(state)
        assert contents(older) == epoch(0)[1:]


def test_a_batch_that_is_taken_past_a_running_preloader_is_refused_and_none_is_lost(depth):
    with workers() as loader:
        iterator = iter(Preloader(loader, "cpu", depth))
        batches = [next(iterator)]
        with pytest.raises(RuntimeError, match="a Preloader reads this epoch"):
            next(loader)
        batches += iterator
        assert contents(batches) == epoch(0)


def test_loaders_without_persistent_workers_serve_several_preloaders():
    with workers(persists=False) as loader:
        pairs = zip(Preloader(loader, "cpu", 2), Preloader(loader, "cpu", 2), strict=True)
        both = [(first.tolist(), second.tolist()) for first, second in pairs]
        assert both == list(zip(epoch(0), epoch(1), strict=True))
