"""A dataset reaches workers that are not forked whole; its large arrays are shared, not pickled."""

import os
import pickle
from multiprocessing import reduction

import numpy as np
import pytest

from loaders.workers import spawning
from loaders.workers.reader import Reader
from loaders.workers.shared_memory import write_shared
from loaders.workers.spawning import LARGE, SpawnedReader


class Images:
    def __init__(self, **arrays) -> None:
        vars(self).update(arrays)


class Marked(np.ndarray):
    """A subclass, which is pickled in its own way."""


class Passed:
    """Stands in for multiprocessing's DupFd, which sends a descriptor to another process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        return os.dup(self.fd)


@pytest.fixture
def written(monkeypatch) -> list:
    """The arrays that are put into shared memory."""
    arrays: list = []
    monkeypatch.setattr(reduction, "DupFd", Passed)
    monkeypatch.setattr(spawning, "write_shared", lambda array: arrays.append(array) or write_shared(array))
    return arrays


@pytest.fixture
def spawned():
    made = []

    def make(dataset, collate_fn=list, init_fn=None) -> SpawnedReader:
        reader = Reader(dataset, collate_fn, True, 1, None, False)
        made.append(SpawnedReader(reader, 0, init_fn))
        return made[-1]

    yield make
    for one in made:
        one.close()


def arrived(reader: SpawnedReader) -> tuple[Images, bytes]:
    """The dataset as a worker gets it, and its pickle."""
    pickled = bytes(reduction.ForkingPickler.dumps(reader))
    received, memory = pickle.loads(pickled)
    os.close(memory)
    return received.dataset, pickled


def test_large_arrays_are_shared_once_for_all_workers_and_the_rest_is_pickled(spawned, written):
    large, small = np.arange(LARGE // 8).reshape(2, -1), np.arange(LARGE // 8 - 1)
    reader = spawned(Images(large=large, same=large, small=small))
    for _ in range(2):
        dataset, pickled = arrived(reader)
        assert dataset.large.dtype == large.dtype
        assert np.array_equal(dataset.large, large)
        assert np.array_equal(dataset.same, large)
        assert np.array_equal(dataset.small, small)
        assert len(pickled) < 1.5 * LARGE
    assert [id(array) for array in written] == [id(large)]


@pytest.mark.parametrize(
    "array", [np.zeros(LARGE).view(Marked), np.full(LARGE, None)], ids=["a subclass", "an array of objects"]
)
def test_other_arrays_are_pickled_in_their_own_way(spawned, written, array):
    dataset, _ = arrived(spawned(Images(array=array)))
    assert type(dataset.array) is type(array)
    assert np.array_equal(dataset.array, array)
    assert written == []


def test_close_closes_the_descriptors(spawned, written):
    reader = spawned(Images(large=np.zeros(LARGE)))
    before = len(os.listdir("/proc/self/fd"))
    arrived(reader)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


class Refusing:
    """Cannot be pickled, though each of its attributes can."""

    def __reduce__(self):
        raise TypeError("not me")


@pytest.mark.parametrize(
    ("dataset", "settings", "name"),
    [
        (Images(good=1, load=lambda index: index), {}, r"dataset\.load \(<function"),
        (Refusing(), {}, r"dataset \(<.*Refusing"),
        (Images(), {"collate_fn": lambda samples: samples}, r"collate_fn \(<function"),
        (Images(), {"init_fn": lambda worker: None}, r"worker_init_fn \(<function"),
    ],
    ids=["attribute", "dataset", "collate_fn", "worker_init_fn"],
)
def test_what_cannot_be_pickled_is_named_with_advice(spawned, written, dataset, settings, name):
    with pytest.raises(TypeError, match=rf"^{name}.* cannot be pickled.*multiprocessing_context='fork'"):
        reduction.ForkingPickler.dumps(spawned(dataset, **settings))


def test_what_refuses_once_only_is_an_error_too(spawned, written):
    class RefusingOnce(Refusing):
        refusals = iter([TypeError("not now")])

        def __reduce__(self):
            for refusal in self.refusals:
                raise refusal
            return Images, ()

    with pytest.raises(TypeError, match=r"^the dataset cannot be pickled.*: not now$"):
        reduction.ForkingPickler.dumps(spawned(RefusingOnce()))
