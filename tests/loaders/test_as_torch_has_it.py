"""What a program that had a DataLoader meets: methods that are there or not, arguments that torch takes, copies."""

import copy
import pickle

import pytest
import torch
from example_datasets import Numbers, Stream, contents
from torch.utils.data import DataLoader

from loaders import Preloader, SeededLoader, WorkerLoader

OF_SEEDS = ["set_epoch", "state_dict", "load_state_dict"]


@pytest.mark.parametrize(
    ("kind", "dataset", "settings", "expected"),
    [
        (WorkerLoader, Numbers(24), {}, []),
        (WorkerLoader, Stream(6), {}, []),
        (WorkerLoader, Numbers(24), {"seed": 0}, OF_SEEDS),
        (DataLoader, Numbers(24), {}, []),
    ],
)
def test_only_a_loader_with_a_seed_has_set_epoch_and_a_state(kind, dataset, settings, expected, closed_later):
    inner = kind(dataset, 4, **settings)
    assert [name for name in OF_SEEDS if hasattr(inner, name)] == expected
    for depth in (0, 2):
        loader = closed_later(Preloader(inner, "cpu", depth))
        for _ in range(2):
            assert [name for name in OF_SEEDS if hasattr(loader, name)] == (expected or ["set_epoch"])
            loader.set_epoch(3)  # it does no harm without a sampler to tell
            assert torch.cat(list(loader)).tolist() == list(range(len(dataset)))


class Scales:
    """Its collate_fn is one of its methods."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, collate_fn=self.scaled, **settings)

    def scaled(self, samples):
        return 10 * torch.tensor(samples)


class Scaling(Scales, WorkerLoader):
    pass


class SeededScaling(Scales, SeededLoader):
    pass


KINDS = pytest.mark.parametrize(("kind", "seed"), [(Scaling, None), (SeededScaling, 0)])


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@KINDS
def test_a_loader_whose_collate_fn_is_its_method_can_be_copied_and_pickled(kind, seed, way):
    with way(kind(Numbers(4), 2, seed=seed)) as loader:
        assert contents(loader) == [[0, 10], [20, 30]]


@pytest.mark.parametrize("kind", [DataLoader, WorkerLoader])
def test_an_iterators_workers_can_be_named_after_its_end(kind):
    iterator = iter(kind(Numbers(4), 2, num_workers=2))
    running = [worker.pid for worker in iterator._workers]
    assert len(list(iterator)) == 2
    assert [worker.pid for worker in iterator._workers] == running and len(running) == 2
