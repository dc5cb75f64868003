"""What a program that had a DataLoader meets: methods that are not there, arguments that torch takes, one sentence."""

import json
import multiprocessing
from pickle import PicklingError

import numpy as np
import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import DataLoader, IterableDataset

from loaders import Preloader, ResidentLoader, TorchLoader, WorkerLoader

LENGTH, BATCH_SIZE = 24, 4


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(range(6))


# Without a seed


OF_SEEDS = ("set_epoch", "state_dict", "load_state_dict")


@pytest.mark.parametrize("dataset", [Numbers(LENGTH), Stream()], ids=["map-style", "iterable"])
def test_a_loader_without_a_seed_has_no_set_epoch_and_no_state(dataset):
    with WorkerLoader(dataset, BATCH_SIZE) as loader:
        assert [name for name in OF_SEEDS if hasattr(loader, name)] == []
        list(loader)
        assert [name for name in OF_SEEDS if hasattr(loader, name)] == []


def test_a_loader_with_a_seed_has_set_epoch_and_state():
    with WorkerLoader(Numbers(LENGTH), BATCH_SIZE, seed=0) as loader:
        assert [name for name in OF_SEEDS if hasattr(loader, name)] == list(OF_SEEDS)
        with Preloader(loader, "cpu") as preloader:
            assert [name for name in OF_SEEDS if hasattr(preloader, name)] == list(OF_SEEDS)


@pytest.mark.parametrize("kind", [WorkerLoader, DataLoader])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_preloader_has_a_state_only_where_its_loader_has_one(kind, depth):
    with Preloader(kind(Numbers(LENGTH), BATCH_SIZE), "cpu", depth) as preloader:
        assert not hasattr(preloader, "state_dict") and not hasattr(preloader, "load_state_dict")
        assert len(list(preloader)) == LENGTH // BATCH_SIZE
        assert not hasattr(preloader, "state_dict") and not hasattr(preloader, "load_state_dict")


@pytest.mark.parametrize("depth", [0, 2])
def test_set_epoch_of_a_preloader_without_a_sampler_to_tell_does_no_harm(depth):
    with Preloader(WorkerLoader(Numbers(LENGTH), BATCH_SIZE), "cpu", depth) as preloader:
        preloader.set_epoch(3)
        assert torch.cat(list(preloader)).tolist() == list(range(LENGTH))


# Arguments


@pytest.mark.parametrize("kind", [WorkerLoader, TorchLoader, ResidentLoader])
@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint64])
def test_a_seed_may_be_numpys(integer, kind):
    def epoch_and_state(seed) -> tuple[list, str]:
        with kind(Numbers(LENGTH), BATCH_SIZE, shuffle=True, seed=seed) as loader:
            return contents(loader), json.dumps(loader.state_dict())

    assert epoch_and_state(integer(3)) == epoch_and_state(3)


@pytest.mark.parametrize("seed", [None, 0])
def test_a_lambda_as_worker_init_fn_is_named_where_workers_are_spawned(seed):
    loader = WorkerLoader(
        Numbers(4), num_workers=1, seed=seed, multiprocessing_context="spawn", worker_init_fn=lambda worker: None
    )
    with loader, pytest.raises((AttributeError, PicklingError), match=r"worker_init_fn \(.*lambda.*cannot be pickled"):
        iter(loader)
    assert multiprocessing.active_children() == []


# Other systems than Linux


ELSEWHERE = """
import logging
import sys
import loaders.worker_loader
from loaders import WorkerLoader

logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
loaders.workers.engine.HAS_PROCESSES = False
for settings in ({"num_workers": 0}, {"num_workers": 2, "worker_method": "thread"}):
    with WorkerLoader(list(range(8)), 4, seed=0, persistent_workers=True, **settings) as loader:
        assert len(list(loader)) == 2
sys.stderr.write("from here on there are to be worker processes\\n")
for _ in range(2):
    with WorkerLoader(list(range(8)), 4, num_workers=2, seed=0, persistent_workers=True) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
print("whole")
"""


def test_without_worker_processes_a_seeded_loader_says_once_that_threads_read(python):
    done = python.run("-c", ELSEWHERE, timeout=100)
    assert done.stdout == "whole\n", done.stderr
    before, after = done.stderr.split("from here on there are to be worker processes\n")
    assert "threads read" not in before
    assert after.count("threads read the samples") == 1 and after.startswith("WARNING")
