"""torchdata's nodes under a Preloader: any iterable of batches serves, and one with a state resumes."""

import pytest

nodes = pytest.importorskip("torchdata.nodes")

import torch
from torch.utils.data import SequentialSampler, default_collate

from loaders import Preloader

LENGTH, BATCH_SIZE = 22, 4


def read(indices: list[int]) -> dict[str, torch.Tensor]:
    return default_collate([{"x": torch.tensor([index, 1.0]), "index": index} for index in indices])


def pipeline(sampler, **settings) -> "nodes.Loader":
    batches = nodes.Batcher(nodes.SamplerWrapper(sampler), BATCH_SIZE, drop_last=False)
    return nodes.Loader(nodes.ParallelMapper(batches, read, **settings) if settings else nodes.Mapper(batches, read))


def numbers(batches) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


WHOLE = [[*range(start, min(start + BATCH_SIZE, LENGTH))] for start in range(0, LENGTH, BATCH_SIZE)]
SETTINGS = pytest.mark.parametrize("settings", [{}, {"num_workers": 2, "method": "thread"}], ids=["inline", "threads"])


@SETTINGS
@pytest.mark.parametrize("depth", [0, 2])
def test_epochs_have_every_batch_in_order_and_a_state_resumes_after_the_last_batch_received(settings, depth):
    with Preloader(pipeline(SequentialSampler(range(LENGTH)), **settings), "cpu", depth) as loader:
        assert [numbers(loader) for _ in range(2)] == [WHOLE] * 2
        batches = iter(loader)
        assert numbers(next(batches) for _ in range(3)) == WHOLE[:3]
        state = loader.state_dict()
    with Preloader(pipeline(SequentialSampler(range(LENGTH)), **settings), "cpu", depth) as loader:
        loader.load_state_dict(state)
        assert [numbers(loader) for _ in range(2)] == [WHOLE[3:], WHOLE]
