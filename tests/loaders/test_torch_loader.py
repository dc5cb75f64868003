"""What is particular to TorchLoader; what all loaders promise is in test_contract.py."""

import logging
import multiprocessing
import os
import sys
from functools import partial
from multiprocessing.synchronize import Event

import pytest
import torch
from example_datasets import Augmented, Noisy, Numbers, failing

from loaders import TorchLoader
from loaders.workers.reader import warn_of_unseeded_reading


@pytest.fixture
def make(closed_later):
    def make(dataset, batch_size: int = 2, **settings) -> TorchLoader:
        return closed_later(TorchLoader(dataset, batch_size, **settings))

    return make


@pytest.mark.timeout(60)
def test_a_worker_that_hangs_is_an_error_after_the_timeout(torch_looks_often, make):
    loader = make(failing(Noisy, "hang", (0,)), num_workers=1, timeout=1)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(loader)


@pytest.mark.timeout(60)
def test_a_worker_that_is_killed_is_an_error_and_not_the_end_of_the_epoch(torch_looks_often, make):
    iterator = iter(loader := make(failing(Noisy, "SIGKILL", (0,)), num_workers=1))
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)"):
        next(iterator)
    for _ in range(3):
        with pytest.raises((RuntimeError, OSError), match=r"exited unexpectedly|stopped early|reset by peer"):
            next(iterator)
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 0)


@pytest.mark.timeout(30)
@pytest.mark.skipif(sys.platform != "linux", reason="workers must be forked to inherit the slow is_set")
def test_close_does_not_kill_a_worker_that_holds_a_lock(make, monkeypatch, bound):
    # Torch's workers and close() share an event. Whoever is killed inside it leaves it locked, and close() waits.
    # Here the worker, when it looks for the second time, holds the lock until close() asks for it.
    holding, asking = multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)
    parent, is_set, set_event, looks = os.getpid(), Event.is_set, Event.set, []

    def is_set_slowly(event: Event) -> bool:
        if os.getpid() != parent:
            with event._cond:
                looks.append(event)
                holding.release()
                if len(looks) == 2:
                    asking.acquire(timeout=bound / 4)
        return is_set(event)

    def ask_and_set(event: Event) -> None:
        asking.release()
        set_event(event)

    monkeypatch.setattr(Event, "is_set", is_set_slowly)
    monkeypatch.setattr(Event, "set", ask_and_set)
    loader = make(Numbers(8), num_workers=1)
    next(loader)
    assert all(holding.acquire(timeout=bound) for _ in range(2))
    loader.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_augment_differently(make, num_workers):
    ranks = [next(make(Augmented(8), rank=rank, world_size=2, num_workers=num_workers)) for rank in range(2)]
    assert not any(torch.equal(one, other) for one, other in zip(*(batch[1:] for batch in ranks), strict=True))


def test_a_thread_that_reads_a_plain_dataset_leaves_the_global_generators_unseeded_and_says_so_once(
    make, in_thread, bound, caplog
):
    warn_of_unseeded_reading.cache_clear()
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    with caplog.at_level(logging.WARNING, logger="loaders"):
        for _ in range(2):
            in_thread(list, iter(make(Numbers(4)))).result(bound)
    assert len(caplog.records) == 1
    assert "samples are read in a thread" in caplog.text
    assert torch.equal(torch.rand(()), expected)


def test_invalid_arguments_are_refused_with_a_message(make):
    with pytest.raises(TypeError, match="needs a map-style dataset, and generator has no __len__"):
        make(number for number in range(3))
    with pytest.raises(ValueError, match="batch_size=0: give a number from 1"):
        make(Numbers(3), batch_size=0)
    with pytest.raises(ValueError, match="num_workers"):
        make(Numbers(3), num_workers=-1)


@pytest.mark.cuda
def test_pinned_batches_are_page_locked(make):
    assert all(batch.is_pinned() for batch in make(Numbers(6), pin_memory=True, num_workers=1))


class Unpicklable(ValueError):
    """An error that no process can send as it is."""

    def __reduce__(self):
        raise TypeError("not to be pickled")


def fails_in_the_first_batch(error: type[Exception], samples: list[int]) -> list[int]:
    if 0 in samples:
        raise error("sample 0 is bad")
    return samples


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", [ValueError, Unpicklable])
def test_an_error_takes_its_batchs_place_in_the_state(make, num_workers, error):
    loader = make(Numbers(6), num_workers=num_workers, collate_fn=partial(fails_in_the_first_batch, error))
    with pytest.raises((ValueError, RuntimeError), match="sample 0 is bad"):
        next(loader)
    assert loader.state_dict()["samples"] == 2
    assert next(loader) == [2, 3]


def with_a_draw(samples: list[int]) -> tuple[list[int], float]:
    return samples, torch.rand(()).item()


def test_what_collate_fn_draws_is_the_same_without_workers(make):
    inline, workers = (list(make(Numbers(6), num_workers=n, collate_fn=with_a_draw)) for n in (0, 2))
    assert inline == workers
