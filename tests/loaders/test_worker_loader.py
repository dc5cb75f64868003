"""What WorkerLoader promises beyond the contract of all loaders (test_contract.py)."""

import copy
import json
import multiprocessing
import os
import pickle
from pickle import PicklingError

import numpy as np
import pytest
import torch
from example_datasets import Numbers
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, get_worker_info

from loaders import Preloader, WorkerLoader


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


class Ragged(Images):
    """Batches of all sizes, from a collate_fn that stacks nothing."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 + index * 1000,), index)


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


@pytest.mark.parametrize("depth", [0, 2])
def test_a_preloader_gives_the_batches_of_its_loader(depth):
    assert epochs(Preloader(seeded(Written(), 2), "cpu", depth)) == epochs(seeded(Written(), 0))


@pytest.mark.parametrize("delivered", [6, 9])
def test_a_resume_goes_on_exactly_with_another_number_of_workers_and_reads_nothing_again(delivered):
    whole = [batch for epoch in epochs(seeded(Written(), 0)) for batch in epoch]
    with seeded(Written(), 2) as loader:
        for _ in range(delivered):
            try:
                next(loader)
            except StopIteration:
                next(loader)
        state = loader.state_dict()
    with seeded(Written(), 3, prefetch_factor=1) as resumed:
        resumed.load_state_dict(state)
        rest = [plain(batch) for batch in resumed]
    assert rest == whole[delivered : delivered + len(rest)]


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


def test_the_default_without_a_seed_is_torchs_to_the_letter():
    def batches(kind) -> list:
        torch.manual_seed(3)
        loader = kind(Images(), 3, shuffle=True, num_workers=2)
        return [[plain(batch) for batch in loader] for _ in range(2)]

    assert batches(WorkerLoader) == batches(DataLoader)


# Slots


def test_kept_batches_stay_as_they_were_even_after_close():
    with seeded(Written(200), 2) as loader:
        kept = list(loader)
        list(loader)
    assert [plain(batch) for batch in kept] == epochs(seeded(Written(200), 0), 1)[0]
    assert loader.stats() == {}


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


def test_batches_of_all_sizes_and_odd_tensors_arrive_whole():
    with seeded(Ragged(40), 2, collate_fn=as_list) as loader:
        for batch in loader:
            assert [set(tensor.tolist()) for tensor in batch] == [{(len(tensor) - 1) // 1000} for tensor in batch]

    strange = [
        torch.sparse_coo_tensor([[1]], [2.0], (3,)),
        torch.zeros(2, 3).t(),
        torch.ones(1).expand(4, 5),
        torch.zeros(0, 7),
        torch.tensor(True),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.complex64).conj(),
    ]
    with seeded(strange, 2, batch_size=None, shuffle=False) as loader:
        for _ in range(2):
            for given, tensor in zip(strange, loader, strict=True):
                assert tensor.layout == given.layout and tensor.shape == given.shape and tensor.dtype == given.dtype
                assert torch.equal(tensor.to_dense(), given.to_dense())


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


class SlowLast(Images):
    """The last sample waits for `go`."""

    def __init__(self) -> None:
        super().__init__(8)
        self.go = multiprocessing.Event()

    def __getitem__(self, index: int) -> int:
        if index == 7:
            assert self.go.wait(30)
        return index


def test_out_of_order_an_epoch_still_has_its_own_batches_only():
    dataset = SlowLast()
    with seeded(dataset, 2, batch_size=1, shuffle=False, in_order=False) as loader:
        iterator = iter(loader)
        early = [next(iterator).item() for _ in range(7)]
        assert sorted(early) == list(range(7))
        dataset.go.set()
        assert [batch.item() for batch in iterator] == [7]


def test_iterators_without_persistent_workers_are_independent():
    with seeded(Written(), 1, persistent_workers=False) as loader:
        one, other = iter(loader), iter(loader)
        interleaved = [(plain(a), plain(b)) for a, b in zip(one, other, strict=True)]
    first, second = epochs(seeded(Written(), 0))
    assert interleaved == list(zip(first, second, strict=True))


# Workers


class AboutWorkers(Images):
    def __getitem__(self, index: int) -> tuple:
        info = get_worker_info()
        return info.id, info.num_workers, os.getpid()


def test_workers_know_who_they_are_and_take_turns():
    batches = list(WorkerLoader(AboutWorkers(8), 2, num_workers=2))
    assert [batch[0].tolist() for batch in batches] == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert os.getpid() not in {pid for batch in batches for pid in batch[2].tolist()}


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


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("raises", LookupError, "sample 2 is bad"),
        ("None", TypeError, "expected Tensor as element 0|default_collate"),
        ("another shape", RuntimeError, "stack expects each tensor to be equal size"),
    ],
)
def test_a_bad_sample_is_the_error_of_its_batch_and_the_epoch_goes_on(num_workers, what, error, message):
    with seeded(Bad(what), num_workers, batch_size=2, shuffle=False) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(error, match=message) as raised:
            next(iterator)
        assert torch.equal(next(iterator), torch.zeros(2, 3))
    assert num_workers == 0 or "Original Traceback" in str(raised.value)


def test_an_index_out_of_range_raises_the_datasets_own_error():
    with pytest.raises(IndexError):
        list(WorkerLoader(list(range(3)), sampler=[0, 1, 7], num_workers=1, seed=0))


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


def test_breaking_off_and_closing_leaves_no_process_and_no_descriptor():
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for number in range(4):
        with seeded(Written(), 2, persistent_workers=bool(number % 2)) as loader:
            next(iter(loader))
    assert multiprocessing.active_children() == []
    assert descriptors() <= before + 1


def test_a_hundred_million_samples_are_shuffled_without_a_list_of_them():
    with seeded(range(10**8), 1, batch_size=4) as loader:
        assert len(set(next(iter(loader)).tolist())) == 4


def test_a_loader_can_be_pickled_while_it_runs():
    with seeded(Written(), 1) as loader:
        iterator = iter(loader)
        next(iterator)
        twin = pickle.loads(pickle.dumps(loader))
        assert len(list(twin)) == len(loader)
        twin.close()


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


class Wholesale(Dataset):
    """Reads several samples at once, and not one."""

    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list) -> list:
        return indices


@pytest.mark.parametrize("seed", [None, 0])
def test_a_dataset_may_have_getitems_alone(seed, reader):
    with WorkerLoader(Wholesale(), 4, seed=seed, **reader) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_next_after_a_finished_iterator_begins_the_next_epoch_although_the_iterator_is_still_referenced():
    with WorkerLoader(Numbers(4), 2, seed=0) as loader:
        finished = iter(loader)
        assert len(list(finished)) == 2
        assert next(loader).tolist() == [0, 1]
        assert next(loader).tolist() == [2, 3]
        with pytest.raises(StopIteration):
            next(loader)
        assert next(loader).tolist() == [0, 1]


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
