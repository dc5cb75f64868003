"""pin_memory=True: who copies a batch to a GPU by itself gets memory that torch fences; a Preloader gets the slots."""

import pytest
import torch
from example_datasets import Numbers

from loaders import Preloader, WorkerLoader
from loaders.workers import dispatcher, engine


class Images(Numbers):
    """Sample i is 64 KB of i."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 16,), index % 251, dtype=torch.uint8)


class Pinned(list):
    """Stands for a batch in torch's pinned memory."""


@pytest.fixture
def a_gpu(monkeypatch):
    """Has loaders believe in a GPU, and wraps what torch would pin; notes whether slots are to be page-locked."""
    page_locked = []
    ring = engine.SlotRing

    def make_ring(count: int, shared: bool, locks: bool):
        page_locked.append(locks)
        return ring(count, shared)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatcher, "pinned", lambda batch: Pinned([batch.clone()]))
    monkeypatch.setattr(engine, "SlotRing", make_ring)
    return page_locked


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 0])
def test_without_a_preloader_every_batch_is_in_torchs_pinned_memory(a_gpu, seed, num_workers):
    with WorkerLoader(Images(12), 4, num_workers=num_workers, seed=seed, pin_memory=True) as loader:
        batches = list(loader)
    assert [type(batch) for batch in batches] == [Pinned] * 3
    assert [batch[0][:, 0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert not any(a_gpu), "slots that torch cannot fence are not page-locked"


@pytest.mark.parametrize("seed", [None, 0])
def test_who_holds_batches_until_they_are_copied_gets_page_locked_slots(a_gpu, seed):
    with WorkerLoader(Images(12), 4, num_workers=2, seed=seed, pin_memory=True) as loader:
        loader.holds_batches_until_copied = True
        assert all(type(batch) is torch.Tensor for batch in loader)
    assert a_gpu == [True]


def test_a_preloader_to_the_cpu_copies_nothing_and_so_does_not_hold_batches():
    loader = WorkerLoader(Images(12), 4, num_workers=2, seed=0, pin_memory=True)
    with Preloader(loader, "cpu", 2) as batches:
        assert len(list(batches)) == 3
        assert not loader.holds_batches_until_copied


@pytest.mark.cuda
@pytest.mark.parametrize("seed", [None, 0])
def test_a_users_own_non_blocking_copy_is_whole_though_the_batch_is_dropped_at_once(seed):
    with WorkerLoader(Images(400), 4, num_workers=2, seed=seed, pin_memory=True) as loader:
        copies = []
        for batch in loader:
            torch.cuda._sleep(20_000_000)  # so the copy is still to come when the batch is dropped
            copies.append(batch.cuda(non_blocking=True))
            del batch
        for number, copy in enumerate(copies):
            expected = torch.arange(4 * number, 4 * number + 4) % 251
            assert torch.equal(copy.cpu(), expected.to(torch.uint8)[:, None].expand(-1, 1 << 16))
