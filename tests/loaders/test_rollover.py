"""last_batch="rollover": what a batch that begins in one epoch and ends in the next one must keep of every promise.

Which indices it has is tested in test_order.py, and what any loader promises in test_contract.py.
"""

import os
import signal
from itertools import chain
from multiprocessing import RawValue

import numpy as np
import pytest
import torch
from example_datasets import Numbers, contents
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from loaders import LoaderConfig, Preloader, Random, ResidentLoader, WorkerLoader, build_loader
from loaders.build import LOADERS

LENGTH, BATCH_SIZE = 18, 5  # the epochs begin with 0, 3, 1, 4 and 2 samples of the one before


class Plain:
    """Sample i is i and a draw from torch's default generator."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict:
        return {"index": index, "draw": torch.rand((), dtype=torch.float64)}


class Written(Plain):
    """Sample i is i and a draw from the `random` that read_batch, or augment_batch, is given."""

    def sample_spec(self) -> dict:
        return {"index": ((), torch.int64), "draw": ((), torch.float64)}

    def read_batch(self, indices, out, random) -> None:
        out["draw"].copy_(torch.from_numpy(random.uniform(1)[:, 0]))
        out["index"].copy_(torch.from_numpy(indices))

    def arrays(self) -> dict:
        return {"index": np.arange(LENGTH), "draw": np.zeros(LENGTH)}

    def augment_batch(self, batch, random) -> dict:
        return {**batch, "draw": torch.from_numpy(random.uniform(1)[:, 0])}


class Failing(Written):
    """Reading sample `bad` raises, or kills the worker, the first `times` times; always if that is -1."""

    def __init__(self, bad: int, how: str, times: int) -> None:
        self.bad, self.how, self.times = bad, how, times
        self.failed = RawValue("q", 0)

    def read_batch(self, indices, out, random) -> None:
        if self.bad in indices.tolist() and self.failed.value != self.times:
            self.failed.value += 1
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"sample {self.bad} is bad")
        super().read_batch(indices, out, random)


def rolling(dataset, kind=WorkerLoader, **settings):
    settings = {"shuffle": True, "seed": 3, "last_batch": "rollover", **settings}
    if kind is WorkerLoader:
        settings = {"persistent_workers": True, **settings}
    return kind(dataset, BATCH_SIZE, **settings)


def rows(loader, epochs: int) -> list[tuple[int, float]]:
    """The index and the draw of each row, over several epochs."""
    batches = [batch for _ in range(epochs) for batch in loader]
    return [pair for batch in batches for pair in zip(batch["index"].tolist(), batch["draw"].tolist(), strict=True)]


def as_in_their_own_epochs(kind: type, epochs: int) -> list[tuple[int, float]]:
    with rolling(kind(), last_batch="keep", num_workers=0) as loader:
        return rows(loader, epochs)


# Random numbers


@pytest.mark.parametrize("kind", [Plain, Written])
def test_a_sample_that_is_carried_over_draws_what_it_would_have_drawn_in_its_own_epoch(kind, reader):
    if kind is Plain and reader.get("worker_method") == "thread":
        pytest.skip("threads leave the global generators alone")
    with rolling(kind(), **reader) as loader:
        assert rows(loader, 5) == as_in_their_own_epochs(kind, 5)


def test_what_a_resident_loader_carries_over_is_augmented_as_in_its_own_epoch():
    with rolling(Written(), ResidentLoader) as loader:
        assert rows(loader, 5) == as_in_their_own_epochs(Written, 5)


def test_ranks_draw_what_one_process_draws():
    shares = []
    for rank in range(5):
        with WorkerLoader(
            Written(), 1, shuffle=True, seed=3, last_batch="rollover", rank=rank, world_size=5
        ) as loader:
            shares.append(rows(loader, 5))
    assert list(chain.from_iterable(zip(*shares, strict=True))) == as_in_their_own_epochs(Written, 5)


def test_a_transform_draws_by_the_epoch_and_the_number_of_its_batch():
    def draw(batch, random):
        return random.uniform(2).tolist()

    with Preloader(rolling(Numbers(LENGTH)), "cpu", 2, transform=draw) as loader:
        for epoch, count in enumerate((3, 4, 3)):
            assert list(loader) == [Random(3, epoch, number, 0).uniform(2).tolist() for number in range(count)]


# Faults


CARRIED = {"shuffle": False, "num_workers": 2, "prefetch_factor": 1}  # epoch 1 begins with 15, 16, 17, 0 and 1


def test_a_worker_that_dies_on_a_batch_of_two_epochs_changes_nothing():
    dataset = Failing(17, "kill", times=3)  # so often that it is retried sample by sample
    with rolling(dataset, **CARRIED) as loader, rolling(Written(), shuffle=False) as calm:
        assert rows(loader, 3) == rows(calm, 3)
        assert loader.stats()["workers"]["deaths"] == 3


@pytest.mark.parametrize("bad", [17, 1])
def test_a_sample_left_out_of_a_batch_of_two_epochs_leaves_the_others_as_they_were(bad):
    with rolling(Failing(bad, "raise", times=-1), on_error="skip", **CARRIED) as loader:
        seen = rows(loader, 3)
    with rolling(Written(), shuffle=False) as calm:
        assert seen == [row for row in rows(calm, 3) if row[0] != bad]


def test_an_error_in_a_batch_of_two_epochs_counts_as_that_batch(reader):
    with rolling(Failing(17, "raise", times=1), shuffle=False, **reader) as loader:
        assert len(list(loader)) == 3
        iterator = iter(loader)
        with pytest.raises(ValueError, match="sample 17 is bad"):
            next(iterator)
        assert loader.state_dict()["samples"] == 5
        assert next(iterator)["index"].tolist() == [2, 3, 4, 5, 6]


# Epochs


def test_loading_ahead_passes_over_epochs_without_a_batch():
    # Batches of eight samples out of three: most epochs are too short to end one.
    with WorkerLoader(
        Numbers(3), 8, seed=0, num_workers=1, prefetch_factor=2, persistent_workers=True, last_batch="rollover"
    ) as loader:
        assert [len(list(loader)) for _ in range(9)] == [0, 0, 1, 0, 0, 1, 0, 1, 0]
        loader.set_epoch(2)
        assert contents(loader) == [[0, 1, 2, 0, 1, 2, 0, 1]]
        assert contents(loader) == []
        assert loader.state_dict()["epoch"] == 4


def test_without_batching_samples_come_as_in_their_epochs():
    with WorkerLoader(Numbers(3), None, seed=0, shuffle=True, last_batch="rollover") as loader:
        assert [sorted(loader) for _ in range(2)] == [[0, 1, 2]] * 2


def test_a_dataset_that_grows_is_followed_at_the_next_epoch():
    samples = list(range(LENGTH))
    with rolling(samples) as loader, rolling(list(range(23))) as grown:
        list(loader)
        samples.extend(range(LENGTH, 23))
        grown.set_epoch(1)
        assert len(loader) == len(grown) == 5  # 23 samples, and three of the 23 before
        assert contents(loader) == contents(grown)


def test_our_batch_sampler_in_a_stock_loader_gives_full_batches():
    with rolling(Numbers(LENGTH)) as loader:
        stock = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
        lengths, batches = zip(*[(len(stock), contents(stock)) for _ in range(3)], strict=True)
        assert lengths == (3, 4, 3)
        assert list(batches) == [contents(loader) for _ in range(3)]


def test_every_loader_is_built_with_it():
    for name in LOADERS:
        config = LoaderConfig(name=name, num_workers=0)
        settings = {"batch_size": BATCH_SIZE, "seed": 3, "shuffle": True, "last_batch": "rollover"}
        with build_loader(config, Numbers(LENGTH), **settings) as loader, rolling(Numbers(LENGTH)) as expected:
            for _ in range(3):
                assert len(loader) == len(expected)
                batches = contents(loader)
                if name != "cached":
                    assert batches == contents(expected)
                else:
                    assert len(batches) == len(list(expected))


# What is refused


class Stream(IterableDataset):
    def __iter__(self):
        yield 0


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": None},
        {"sampler": range(LENGTH), "shuffle": None},
        {"batch_sampler": BatchSampler(SequentialSampler(range(LENGTH)), 5, False), "batch_size": 1, "shuffle": None},
    ],
)
def test_without_our_own_order_rollover_is_refused_in_words(settings):
    settings = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3, **settings}
    with pytest.raises(ValueError, match="'rollover' needs a seed and the loader's own order"):
        WorkerLoader(Numbers(LENGTH), last_batch="rollover", **settings)


def test_an_iterable_dataset_cannot_roll_over():
    with pytest.raises(ValueError, match="'rollover' needs a seed and the loader's own order"):
        WorkerLoader(Stream(), 5, seed=3, last_batch="rollover")


def test_without_a_seed_keep_and_drop_are_torchs_drop_last():
    for last_batch, count in (("keep", 4), ("drop", 3)):
        loader = WorkerLoader(Numbers(LENGTH), BATCH_SIZE, last_batch=last_batch)
        assert loader.drop_last == (last_batch == "drop")
        assert len(loader) == len(list(loader)) == count
