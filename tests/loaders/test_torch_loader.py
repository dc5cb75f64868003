"""What is particular to TorchLoader and CachedLoader; what all loaders promise is in test_contract.py."""

import multiprocessing
import os
import signal

import pytest
import torch
from every_loader import ordered
from example_datasets import Augmented, Noisy, Numbers, Stream, contents, failing
from torch.utils.data import IterableDataset

from loaders import Preloader, TorchLoader
from loaders.baselines import CachedLoader, TorchStream


@pytest.fixture
def make(closed_later):
    def make(dataset, batch_size=2, **settings):
        return closed_later(TorchLoader(dataset, batch_size, **{"seed": 0, **settings}))

    return make


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "settings", "said"),
    [
        ("hang", {"timeout": 1}, "timed out after 1 seconds"),
        ("SIGKILL", {}, "is killed by signal|exited unexpectedly"),
    ],
)
def test_a_worker_that_fails_is_torchs_error_and_ends_the_epoch(torch_looks_often, make, how, settings, said):
    loader = make(failing(Noisy, how, (0,)), num_workers=1, **settings)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=said):
        next(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended this epoch"):
            next(iterator)
    loader.close()


def strike(number):
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, number)


def test_ctrl_c_reaches_no_worker(make):
    iterator = iter(make(Numbers(60), num_workers=1))
    seen = [next(iterator)]
    strike(signal.SIGINT)
    assert contents([*seen, *iterator]) == ordered(0, 60, 2, shuffle=False)


def test_after_an_epoch_that_a_dead_worker_has_ended_the_next_has_new_workers(torch_looks_often, make):
    loader = make(Numbers(60), num_workers=1)
    next(loader)
    strike(signal.SIGKILL)
    with pytest.raises((RuntimeError, OSError, EOFError)):  # torch says that it has died, or that its connection broke
        contents(iter(loader))
    assert contents(loader) == ordered(0, 60, 2, shuffle=False)


def test_ranks_augment_differently(make, num_workers):
    ranks = [next(make(Augmented(8), rank=rank, world_size=2, num_workers=num_workers)) for rank in range(2)]
    assert not any(torch.equal(first, second) for first, second in zip(*(batch[1:] for batch in ranks), strict=True))


# CachedLoader repeats the first full batches


@pytest.mark.parametrize("length", [50, 7, 0])
def test_the_first_full_batches_come_again_and_again_and_the_dataset_is_read_for_them_only(length, closed_later):
    reads = []

    class Counted(Numbers):
        def __getitem__(self, index):
            reads.append(index)
            return index

    loader = closed_later(CachedLoader(TorchLoader(Counted(length), 2, shuffle=length > 0, seed=0), 2))
    first = [batch for batch in ordered(0, length, 2)[:8] if len(batch) == 2]
    for _ in range(2):
        assert contents(loader) == [first[number % len(first)] for number in range(len(loader))]
    assert len(reads) <= 2 * 8 and len(loader) == -(-length // 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_raises_stop_iteration_is_named_as_what_ends_the_epoch(closed_later, workers):
    loader = closed_later(TorchLoader(failing(Noisy, "stop", (5,)), 4, seed=0, num_workers=workers))
    with pytest.raises(RuntimeError, match="the dataset or collate_fn raised StopIteration"):
        list(loader)


def test_close_ends_a_preloaders_thread_that_waits_for_torchs_worker(torch_looks_often, make):
    preloader = Preloader(make(failing(Noisy, "hang", (20,)), 4, num_workers=1), "cpu", 2)
    assert [next(preloader)["index"].tolist() for _ in range(3)][-1] == [8, 9, 10, 11]
    preloader.close()  # conftest.py sees whether the thread has ended


# TorchStream


def test_a_stream_is_read_epoch_by_epoch(closed_later, num_workers):
    loader = closed_later(TorchStream(Stream(5), 2, seed=0, streams=1, num_workers=num_workers))
    for _ in range(2):
        assert contents(loader) == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="no length"):
        len(loader)


def test_with_steps_an_epoch_goes_on_where_the_one_before_has_ended(closed_later, caplog, num_workers):
    settings = {"seed": 0, "streams": 1, "num_workers": num_workers, "steps_per_epoch": 2, "drop_last": True}
    loader = closed_later(TorchStream(Stream(6), 2, **settings))
    assert [contents(loader) for _ in range(3)] == [[[0, 1], [2, 3]], [[4, 5], [0, 1]], [[2, 3], [4, 5]]]
    assert next(loader).tolist() == [0, 1]
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (3, 2)
    resumed = closed_later(TorchStream(Stream(6), 2, **settings))
    resumed.load_state_dict(state)
    assert contents(resumed) == [[0, 1]] and "starts again" in caplog.text  # one batch of the epoch was left


def test_a_stream_that_gives_nothing_is_an_error(closed_later):
    with pytest.raises(ValueError, match="gave no batch"):
        next(closed_later(TorchStream(Stream(0), 2, seed=0, streams=1, steps_per_epoch=2)))


def test_an_error_ends_the_epoch_of_a_stream_too(closed_later):
    class Broken(IterableDataset):
        def __iter__(self):
            yield from range(4)
            raise ValueError("sample 4 is bad")

    loader = closed_later(TorchStream(Broken(), 2, seed=0, streams=1))
    assert [next(loader).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="sample 4 is bad"):
        next(loader)
    for _ in range(2):  # and no sample comes a second time
        with pytest.raises(RuntimeError, match="ended this epoch"):
            next(loader)
