"""What WorkerLoader promises beyond the contract of all loaders (test_contract.py)."""

import copy
import json
import multiprocessing
from pickle import PicklingError

import numpy as np
import pytest
import torch
from example_datasets import Numbers
from torch.utils.data import WeightedRandomSampler

from loaders import WorkerLoader


class Images:
    """Plain samples, some random, of several types."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict:
        return {
            "image": torch.full((3, 4), index % 256, dtype=torch.uint8),
            "noise": torch.rand(2),
            "array": np.array([index, np.random.randint(1 << 30)]),
            "name": f"image {index}",
            "number": index / 2,
        }


class Written(Images):
    """The same through read_batch."""

    def sample_spec(self) -> dict:
        return {"image": ((3, 4), torch.uint8), "noise": ((2,), torch.float64), "label": ((), torch.int64)}

    def read_batch(self, indices, out, random) -> None:
        out["image"].copy_(torch.from_numpy(indices % 256)[:, None, None].expand(-1, 3, 4))
        out["noise"].copy_(torch.from_numpy(random.uniform(2)))
        out["label"].copy_(torch.from_numpy(indices))


class Large(Written):
    """The same from an array so large that spawned workers get it in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.arange(1 << 18)

    def read_batch(self, indices, out, random) -> None:
        super().read_batch(self.numbers[indices], out, random)


def as_list(samples: list) -> list:
    return samples


def plain(batch):
    """A batch as lists, to compare."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(value) for value in batch] if isinstance(batch, list) else batch


def epochs(loader, count: int = 2) -> list:
    with loader:
        return [[plain(batch) for batch in loader] for _ in range(count)]


def seeded(dataset, num_workers: int, **settings) -> WorkerLoader:
    settings = {"batch_size": 3, "shuffle": True, "seed": 7, "persistent_workers": True, **settings}
    return WorkerLoader(dataset, num_workers=num_workers, **settings)


# The same bytes


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Images, {"num_workers": 1}),
        (Written, {"num_workers": 1}),
        (Images, {"num_workers": 2, "prefetch_factor": 5}),
        (Written, {"num_workers": 3, "persistent_workers": False}),
        (Images, {"num_workers": 2, "prefetch_batches": 1}),
        (Large, {"num_workers": 1, "multiprocessing_context": "spawn"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_are_equal_whatever_reads_them(kind, settings):
    assert epochs(seeded(kind(), **settings)) == epochs(seeded(kind(), 0))


def test_ranks_share_a_global_batch_with_the_random_numbers_of_a_single_rank():
    whole = [batch["noise"] for batch in seeded(Written(24), 0, batch_size=6)]
    shares = [seeded(Written(24), 0, rank=rank, world_size=2) for rank in (0, 1)]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert torch.equal(batch, torch.cat([part["noise"] for part in parts]))


def test_the_repeats_of_a_weighted_sampler_differ_and_can_be_had_again():
    def noise() -> list:
        sampler = WeightedRandomSampler([1.0, 1.0], 12)
        return [
            row for batch in seeded(Images(2), 2, shuffle=None, sampler=sampler) for row in batch["noise"].tolist()
        ]

    torch.manual_seed(1)
    first = noise()
    torch.manual_seed(2)
    assert noise() == first
    assert len({tuple(row) for row in first}) == 12


# Slots


def test_in_the_steady_state_nothing_is_pickled_or_copied():
    with seeded(Written(300), 2) as loader:
        for _ in range(3):
            for _ in loader:
                pass
        stats = loader.stats()["workers"]
    assert stats["batches"] == 300
    assert (stats["overflowed_batches"], stats["pickled_batches"], stats["copied_batches"]) == (0, 0, 0)


def test_only_the_first_batches_of_a_plain_dataset_find_no_slot():
    with seeded(Images(300), 2) as loader:
        for _ in loader:
            pass
        stats = loader.stats()["workers"]
    assert 1 <= stats["overflowed_batches"] <= 2 * 2
    assert stats["pickled_batches"] == 0


# Epochs


def test_the_next_epoch_is_loaded_ahead_and_dropped_when_another_is_named():
    with seeded(Written(), 2) as loader:
        list(loader)
        assert loader._epochs.engine.continues_with(1, 0)
        loader.set_epoch(5)
        named = [plain(batch) for batch in loader]
    with seeded(Written(), 0) as other:
        other.set_epoch(5)
        assert named == [plain(batch) for batch in other]


def test_a_new_epoch_starts_while_large_tasks_of_the_old_one_fill_the_pipes():
    with seeded(range(24_000), 2, batch_size=4000) as loader:
        next(iter(loader))
        assert [len(batch) for batch in loader] == [4000] * 6


def test_iterators_without_persistent_workers_are_independent():
    with seeded(Written(), 1, persistent_workers=False) as loader:
        one, other = iter(loader), iter(loader)
        interleaved = [(plain(a), plain(b)) for a, b in zip(one, other, strict=True)]
    first, second = epochs(seeded(Written(), 0))
    assert interleaved == list(zip(first, second, strict=True))


# Workers


class Bad(Images):
    def __init__(self, what: str) -> None:
        super().__init__(6)
        self.what = what

    def __getitem__(self, index: int):
        if index != 2:
            return torch.zeros(3)
        if self.what == "raises":
            raise LookupError("sample 2 is bad")
        return {"None": None, "another shape": torch.zeros(4), "unpicklable": lambda: 0}[self.what]


def test_what_cannot_be_pickled_for_spawned_workers_is_named():
    dataset = Images()
    dataset.transform = lambda image: image
    with pytest.raises((AttributeError, PicklingError), match=r"dataset\.transform \(.*lambda.*cannot be pickled"):
        iter(seeded(dataset, 1, multiprocessing_context="spawn"))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_close_ends_the_workers_though_somebody_holds_the_iterator(seed, persistent):
    loader = WorkerLoader(Images(), 2, num_workers=1, seed=seed, persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError):
        next(iterator)


# Bad arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": -1}, "timeout option should be non-negative"),
        ({"timeout": float("inf")}, "timeout=inf: give a number of seconds"),
        ({"batch_size": -2}, "batch_size"),
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"num_workers": True}, "num_workers=True: give an integer from 0"),
        ({"num_workers": 1, "prefetch_factor": 1.5}, r"prefetch_factor=1\.5: give an integer from 0"),
        ({"rank": 0.5, "world_size": 2, "seed": 0}, r"rank=0\.5: give an integer from 0"),
        ({"seed": 1, "generator": torch.Generator()}, "seed=1 and a generator were given"),
        ({"rank": 1, "world_size": 2}, "rank=1 and world_size=2 need a seed"),
        ({"rank": 2, "world_size": 2, "seed": 0}, "rank=2 and world_size=2: ranks are numbered from 0"),
        ({"seed": -1}, "seed=-1: give an integer from 0"),
        ({"seed": 1.5}, "seed=1.5: give an integer from 0"),
        ({"worker_method": "threads"}, "worker_method=threads: did you mean thread"),
        ({"worker_method": "thread", "multiprocessing_context": "fork", "num_workers": 1}, "starts no processes"),
        ({"on_error": "ignore"}, "on_error=ignore: it is one of raise, skip"),
        ({"max_restarts": -1}, "max_restarts=-1: give an integer from 0"),
        ({"prefetch_batches": 0}, "prefetch_batches=0: give the total number of batches"),
        ({"prefetch_batches": 3, "prefetch_factor": 4, "num_workers": 1}, "leave out prefetch_factor"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_in_words(settings, message):
    with pytest.raises(ValueError, match=message):
        WorkerLoader(Images(), **{"batch_size": 2, **settings})


def test_an_order_that_cannot_be_resumed_has_no_state_and_the_error_says_why():
    with pytest.raises(AttributeError, match="needs a loader with a seed"):
        WorkerLoader(Images()).state_dict()
    with pytest.raises(ValueError, match="in_order=False"):
        seeded(Images(), 2, in_order=False).state_dict()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_runs_epochs_of_its_own(duplicate, reader):
    with WorkerLoader(Numbers(24), 4, shuffle=True, seed=0, persistent_workers=True, **reader) as loader:
        expected = [[batch.tolist() for batch in loader] for _ in range(2)]
        loader.set_epoch(0)
        with duplicate(loader) as other:
            pairs = [(ours.tolist(), theirs.tolist()) for ours, theirs in zip(loader, other, strict=True)]
            assert pairs == list(zip(expected[0], expected[0], strict=True))
        assert [batch.tolist() for batch in loader] == expected[1]


def test_set_epoch_takes_numpys_integers():
    loader = WorkerLoader(Numbers(24), 4, shuffle=True, seed=0)
    loader.set_epoch(np.int64(3))
    assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 3


class Tenfold(WorkerLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 10


def test_next_goes_through_the_iter_of_a_subclass(reader):
    with Tenfold(Numbers(8), 4, seed=0, **reader) as loader:
        for _ in range(2):
            assert [next(loader).tolist() for _ in range(2)] == [[0, 10, 20, 30], [40, 50, 60, 70]]
            with pytest.raises(StopIteration):
                next(loader)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_figures_of_an_epoch_can_be_read_after_it_although_its_workers_have_gone(seed, num_workers):
    with WorkerLoader(Numbers(6), 2, seed=seed, num_workers=num_workers) as loader:
        for _ in range(2):
            list(loader)
            assert loader.stats()["workers"]["batches"] == 3
    assert loader.stats() == {}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_collate_fn_that_is_set_between_epochs_without_workers_counts_from_the_next_epoch_on(persistent):
    with WorkerLoader(Numbers(4), 2, seed=0, persistent_workers=persistent) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        loader.collate_fn = as_list
        assert list(loader) == [[0, 1], [2, 3]]
