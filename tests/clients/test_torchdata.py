"""torchdata's nodes under a Preloader: any iterable of batches serves, and one with a state resumes."""

import pytest

nodes = pytest.importorskip("torchdata.nodes")

import torch
from torch.utils.data import RandomSampler, SequentialSampler, default_collate

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
SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2, "method": "process"}], ids=str
)


@SETTINGS
@pytest.mark.parametrize("depth", [0, 2])
def test_every_epoch_has_every_batch_once_in_order(settings, depth):
    with Preloader(pipeline(SequentialSampler(range(LENGTH)), **settings), "cpu", depth) as loader:
        assert [numbers(loader) for _ in range(3)] == [WHOLE] * 3


def test_a_shuffled_pipeline_gives_the_batches_that_it_gives_by_itself():
    def shuffled() -> "nodes.Loader":
        return pipeline(RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(3)))

    alone = shuffled()
    expected = [numbers(alone) for _ in range(3)]
    with Preloader(shuffled(), "cpu", 2) as loader:
        assert [numbers(loader) for _ in range(3)] == expected


@SETTINGS
@pytest.mark.parametrize("received", [0, 3])
def test_a_state_resumes_after_the_last_batch_that_its_consumer_received(settings, received):
    with Preloader(pipeline(SequentialSampler(range(LENGTH)), **settings), "cpu", depth=2) as loader:
        batches = iter(loader)
        assert numbers(next(batches) for _ in range(received)) == WHOLE[:received]
        state = loader.state_dict()
    with Preloader(pipeline(SequentialSampler(range(LENGTH)), **settings), "cpu", depth=2) as loader:
        loader.load_state_dict(state)
        assert [numbers(loader) for _ in range(2)] == [WHOLE[received:], WHOLE]


def test_an_epoch_broken_off_leaves_nothing_of_it_in_the_next():
    with Preloader(pipeline(SequentialSampler(range(LENGTH)), num_workers=2, method="thread"), "cpu") as loader:
        for _ in range(3):
            assert next(iter(loader))["index"].tolist() == WHOLE[0]
        assert numbers(loader) == WHOLE


def test_an_error_of_a_node_comes_out_of_next_with_the_batches_before_it():
    def failing(indices: list[int]) -> dict[str, torch.Tensor]:
        if 9 in indices:
            raise ValueError("sample 9 is bad")
        return read(indices)

    batches = nodes.Batcher(nodes.IterableWrapper(range(LENGTH)), BATCH_SIZE, drop_last=False)
    with Preloader(nodes.Loader(nodes.Mapper(batches, failing)), "cpu", depth=2) as loader:
        batches = iter(loader)
        assert numbers(next(batches) for _ in range(2)) == WHOLE[:2]
        with pytest.raises(ValueError, match="sample 9 is bad"):
            next(batches)
