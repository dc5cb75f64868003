"""What few batches have, and few systems refuse."""

import errno
import os

import pytest
import torch
from example_datasets import Numbers, Stream, contents

from loaders import WorkerLoader
from loaders.workers import slots

WITHOUT_A_COPY = [torch.uint4, torch.int4, torch.uint1, torch.int7]


class Typed(Numbers):
    """Sample i is 300 bytes of another type, every other one of a tensor's."""

    def __getitem__(self, index):
        return torch.full((600,), index, dtype=torch.uint8)[::2].view(WITHOUT_A_COPY[index])


def test_tensors_of_types_that_cannot_be_copied_arrive():
    with WorkerLoader(Typed(4), 2, num_workers=1, collate_fn=list) as loader:
        seen = [tensor for batch in loader for tensor in batch]
    assert [tensor.dtype for tensor in seen] == WITHOUT_A_COPY
    assert [tensor.view(torch.uint8).tolist() for tensor in seen] == [[index] * 300 for index in range(4)]


@pytest.mark.parametrize(("number", "reads"), [(errno.EPERM, "threads"), (errno.EMFILE, "an error")])
def test_if_the_kernel_refuses_memfds_threads_read_but_not_if_descriptors_are_short(number, reads, monkeypatch):
    def refuse(*_):
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


def test_a_stream_with_a_seed_needs_num_workers_0_where_there_are_no_memfds(monkeypatch):
    monkeypatch.setattr("loaders.worker_loader.has_slots", lambda: False)
    settings = {"streams": 1, "seed": 0}
    with (
        WorkerLoader(Stream(4), 2, num_workers=1, **settings) as loader,
        pytest.raises(RuntimeError, match="num_workers=0"),
    ):
        next(iter(loader))
    with WorkerLoader(Stream(4), 2, num_workers=0, **settings) as loader:
        assert contents(loader) == [[0, 1], [2, 3]]


def test_a_profile_has_torchs_range_for_each_batch():
    with torch.profiler.profile() as profile:
        for seed in (None, 0):
            with WorkerLoader(Numbers(4), 2, num_workers=1, seed=seed) as loader:
                list(loader)
    (event,) = [event for event in profile.key_averages() if event.key.startswith("enumerate(DataLoader)#")]
    assert event.count == 2 * 3  # also the one that has ended
