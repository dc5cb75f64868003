"""What few batches have, and few systems refuse."""

import errno
import os
from collections.abc import Iterator, Mapping

import pytest
import torch
from example_datasets import Numbers, contents

from loaders import Preloader, WorkerLoader
from loaders.workers import slots

WITHOUT_A_COPY = [torch.uint4, torch.int4, torch.uint1, torch.int7]


class Typed(Numbers):
    """Sample i is 300 bytes of another type, every other one of a tensor's."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((600,), index, dtype=torch.uint8)[::2].view(WITHOUT_A_COPY[index])


@pytest.mark.parametrize("seed", [None, 0])
def test_tensors_of_types_that_cannot_be_copied_arrive(seed):
    with WorkerLoader(Typed(4), 2, num_workers=1, seed=seed, collate_fn=list) as loader:
        seen = [tensor for batch in loader for tensor in batch]
    assert [tensor.dtype for tensor in seen] == WITHOUT_A_COPY
    assert [tensor.view(torch.uint8).tolist() for tensor in seen] == [[index] * 300 for index in range(4)]


class Pair(tuple):
    """Its constructor takes its items one by one."""

    def __new__(cls, first: object, second: object) -> "Pair":
        return super().__new__(cls, (first, second))


class Named(Mapping):
    """Its constructor takes keywords alone."""

    def __init__(self, **items: object) -> None:
        self.items_ = items

    def __getitem__(self, name: str) -> object:
        return self.items_[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def test_a_container_in_which_no_tensor_moves_stays_as_it_is():
    batches = [Pair(torch.ones(2), 1), Named(image=torch.ones(2))]
    with Preloader(batches, "cpu", 0) as preloader:
        assert all(ours is theirs for ours, theirs in zip(preloader, batches, strict=True))


@pytest.mark.parametrize(("number", "reads"), [(errno.EPERM, "threads"), (errno.EMFILE, "an error")])
def test_if_the_kernel_refuses_memfds_threads_read_but_not_if_descriptors_are_short(number, reads, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    slots.has_slots.cache_clear()
    monkeypatch.setattr(os, "memfd_create", refuse)
    try:
        with WorkerLoader(Numbers(4), 2, num_workers=1, seed=0) as loader:
            if reads == "threads":
                assert contents(loader) == [[0, 1], [2, 3]]
            else:
                with pytest.raises(RuntimeError, match="too many open files"):
                    next(iter(loader))
    finally:
        slots.has_slots.cache_clear()


@pytest.mark.parametrize("seed", [None, 0])
def test_a_profile_has_torchs_range_for_each_batch(seed):
    with WorkerLoader(Numbers(4), 2, num_workers=1, seed=seed) as loader, torch.profiler.profile() as profile:
        list(loader)
    (event,) = [event for event in profile.key_averages() if event.key.startswith("enumerate(DataLoader)#")]
    assert event.count == 3  # also the one that has ended
