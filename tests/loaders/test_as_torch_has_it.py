"""What a program that had a DataLoader meets: methods that are there or not, arguments that torch takes, copies."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import DataLoader, IterableDataset

from loaders import Preloader, ResidentLoader, SeededLoader, TorchLoader, WorkerLoader

LENGTH, BATCH_SIZE = 24, 4


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(range(6))


OF_SEEDS = ["set_epoch", "state_dict", "load_state_dict"]


def over(kind: type, depth: int, seed: dict):
    return lambda: Preloader(kind(Numbers(LENGTH), BATCH_SIZE, **seed), "cpu", depth)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: WorkerLoader(Numbers(LENGTH), BATCH_SIZE), []),
        (lambda: WorkerLoader(Stream(), BATCH_SIZE), []),
        (lambda: WorkerLoader(Numbers(LENGTH), BATCH_SIZE, seed=0), OF_SEEDS),
        *[(over(WorkerLoader, depth, {"seed": 0}), OF_SEEDS) for depth in (0, 2)],
        *[(over(kind, depth, {}), ["set_epoch"]) for kind in (WorkerLoader, DataLoader) for depth in (0, 2)],
    ],
)
def test_only_a_loader_with_a_seed_has_set_epoch_and_a_state(make, expected):
    loader = make()
    for _ in range(2):
        assert [name for name in OF_SEEDS if hasattr(loader, name)] == expected
        assert list(loader)
    getattr(loader, "close", lambda: None)()


@pytest.mark.parametrize("depth", [0, 2])
def test_set_epoch_of_a_preloader_without_a_sampler_to_tell_does_no_harm(depth):
    with Preloader(WorkerLoader(Numbers(LENGTH), BATCH_SIZE), "cpu", depth) as preloader:
        preloader.set_epoch(3)
        assert torch.cat(list(preloader)).tolist() == list(range(LENGTH))


@pytest.mark.parametrize("kind", [WorkerLoader, TorchLoader, ResidentLoader])
def test_seeds_and_epochs_may_be_numpys(kind):
    with kind(Numbers(LENGTH), BATCH_SIZE, shuffle=True, seed=np.uint64(3)) as loader:
        loader.set_epoch(np.int64(2))
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["seed"], state["epoch"]) == (3, 2)
        with kind(Numbers(LENGTH), BATCH_SIZE, shuffle=True, seed=3) as other:
            other.load_state_dict(state)
            assert contents(loader) == contents(other)


class Scales:
    """Its collate_fn is one of its methods."""

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, collate_fn=self.scaled, **settings)

    def scaled(self, samples: list) -> torch.Tensor:
        return 10 * torch.tensor(samples)


class Scaling(Scales, WorkerLoader):
    pass


class SeededScaling(Scales, SeededLoader):
    pass


KINDS = pytest.mark.parametrize(("kind", "seed"), [(Scaling, None), (SeededScaling, 0)])


def test_a_subclass_that_passes_a_seed_derives_from_the_seeded_class():
    with pytest.raises(TypeError, match=r"derive it from loaders\.SeededLoader"):
        Scaling(Numbers(4), 2, seed=0)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@KINDS
def test_a_loader_whose_collate_fn_is_its_method_can_be_copied_and_pickled(kind, seed, way):
    with way(kind(Numbers(4), 2, seed=seed)) as loader:
        assert contents(loader) == [[0, 10], [20, 30]]


@KINDS
def test_spawned_workers_may_use_a_collate_fn_that_is_a_method_of_the_loader(kind, seed):
    with kind(Numbers(4), 2, num_workers=1, multiprocessing_context="spawn", seed=seed) as loader:
        assert contents(loader) == [[0, 10], [20, 30]]


@pytest.mark.parametrize("seed", [None, 0])
def test_an_eager_sampler_is_begun_as_often_as_torch_begins_it(seed):
    class Eager(torch.utils.data.Sampler):
        def __len__(self) -> int:
            return 4

        def __iter__(self):
            return iter(torch.randperm(4).tolist())

    def batches(kind, **more) -> list:
        torch.manual_seed(1)
        loader = kind(Numbers(4), batch_size=None, sampler=Eager(), num_workers=1, **more)
        return [contents(loader) for _ in range(2)]

    ours = batches(WorkerLoader, seed=seed)
    assert ours == (batches(WorkerLoader, seed=seed) if seed is not None else batches(DataLoader))
