"""Page-locked memory on a simulated GPU: what is copied from it, who never gets it, and when it is unlocked."""

import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[level]) for level in (3, 1, 0)]

import strikes  # noqa: E402
from every_loader import Streamed  # noqa: E402
from on_simulated_gpu import Hidden, simulated  # noqa: E402, F401
from simulated_loads import BATCH, DEVICE, ROWS, Rows, consumed, doubled, is_doubled, workers  # noqa: E402
from strikes import Interrupted, moments_of, struck  # noqa: E402

import loaders.workers.batch_buffer  # noqa: E402
from loaders import Preloader, page_locks  # noqa: E402
from loaders.workers import slots  # noqa: E402
from tests.infrastructure import simulated_gpu as sim  # noqa: E402
from tests.infrastructure import simulated_streams as streams  # noqa: E402

LABELS = ROWS * 8  # bytes of an epoch's labels
SLOT = 3 * 16384  # bytes that are locked of a slot with a batch of Rows
METHODS = pytest.mark.parametrize("method", ["multiprocessing", "thread"])


@pytest.fixture(autouse=True)
def locks(monkeypatch):
    """Memory is checked when it is unmapped, small tensors are recycled, and no child has locked anything."""
    monkeypatch.setattr(slots, "_libc", sim.Libc(slots._libc))
    monkeypatch.setattr(loaders.workers.batch_buffer, "LARGE", 1)
    page_locks.limit.cache_clear()
    yield
    gc.collect()  # an exception that was caught may hold a loader in a cycle
    gc.freeze()  # the next collection is short
    assert sim.calls_of_children[0] == 0
    assert not locked(), "memory is still locked"
    page_locks.limit.cache_clear()


def preloader(dataset=None, device=DEVICE, depth=2, transform=doubled, **settings):
    settings = {"pin_memory": False, "persistent_workers": True, **settings}
    return Preloader(workers(dataset, **settings), device, depth, transform)


def locked():
    return [lock for lock in list(sim.locked.values()) if lock.device is not None]


class Sizes(Rows):
    """Batches of different sizes: large ones come late, and many small ones between them."""

    def __getitem__(self, index):
        width = 9000 if index // BATCH in (2, 11) else 3000 if index // BATCH < 2 else 500
        return {"x": torch.full((width,), index, dtype=torch.int32), "label": index}


@METHODS
@pytest.mark.parametrize("seed", [None, 3])
def test_tensors_reach_the_device_without_another_copy_small_ones_too(method, seed):
    with preloader(worker_method=method, seed=seed) as loader:
        before = sim.pinned, sim.blocking
        for _ in range(3):
            consumed(loader)
        assert sim.blocking == before[1]
        # The first batches of threads were begun before a Preloader asked, and their later memory is pinned once.
        assert sim.pinned - before[0] <= (3 * LABELS + 24 * SLOT if method == "thread" else 0)


def test_a_larger_batch_is_locked_anew_and_pages_are_unlocked_before_they_are_given_back(monkeypatch):
    monkeypatch.setattr(slots, "TIDIED_EVERY", 4)
    with preloader(Sizes(), shuffle=False) as loader:
        pinned = sim.pinned
        low = [low for _ in range(3) for low, _, _ in consumed(loader)]
        assert sim.pinned == pinned
    epoch = 2 * torch.arange(ROWS).view(-1, BATCH)
    assert low == epoch.tolist() * 3


@METHODS
def test_without_a_preloader_no_batch_lies_in_memory_that_we_lock_or_recycle(method):
    loader = workers(pin_memory=False, persistent_workers=True, worker_method=method)
    with Preloader(loader, DEVICE, 0, doubled) as preloaded:
        for _ in preloaded:
            pass
        seen = list(loader)  # an epoch whose first batches were read ahead for the preloader
        assert not any(batch["x"].is_pinned() for batch in seen)
        assert all((batch["x"] == batch["label"][:, None]).all() for batch in seen)


@METHODS
def test_host_tensors_that_are_passed_on_are_copied_out(method):
    def collate(samples):
        return Hidden(torch.utils.data.default_collate(samples))

    with preloader(transform=None, collate_fn=collate) as loader:
        kept = [batch for _ in range(2) for batch in loader]
        assert not any(batch.x.is_pinned() for batch in kept)
        assert all((batch.x == batch.label[:, None]).all() for batch in kept)


class Marked(torch.Tensor):
    """A tensor with another one in an attribute, as MONAI's MetaTensor; the simulated device has no subclasses."""

    def to(self, *args, **settings):
        return self


@pytest.mark.parametrize("width", [5, 20000])
def test_tensors_that_nothing_moves_lie_in_no_locked_memory(width):
    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        hidden = np.empty(1, object)
        hidden[0] = torch.full((width,), int(batch["label"][0]))
        marked = torch.zeros(8).as_subclass(Marked)
        marked.mark = {"number": torch.full((5,), int(batch["label"][0]))}
        return {**batch, "hidden": hidden, "marked": marked}

    with preloader(transform=None, collate_fn=collate, shuffle=False) as loader:
        for number, batch in enumerate(loader):
            for tensor in (batch["hidden"][0], batch["marked"].mark["number"]):
                assert not tensor.is_pinned() and (tensor == number * BATCH).all()


def test_a_loader_may_serve_another_device():
    loader = workers(pin_memory=False, persistent_workers=True)
    for device in ("sim:0", "sim:1", "sim:0"):
        blocking = sim.blocking
        loader.set_epoch(0)
        preloaded = Preloader(loader, device, 2, doubled)
        assert all(low == high for low, high, _ in consumed(preloaded))
        preloaded._end_epoch()
        assert sim.blocking == blocking
    loader.close()


@pytest.mark.parametrize("room", [0, 2 * SLOT + 100])
def test_no_more_is_locked_than_a_share_of_the_memory(room, monkeypatch):
    monkeypatch.setattr(page_locks, "available_memory", lambda: room * page_locks.SHARE)
    most = 0
    with preloader() as loader:
        for batch in loader:
            assert is_doubled(batch)
            most = max(most, sum(lock.size for lock in locked()))
    assert most <= room and (most > 0) == (room > 0)


def test_where_locking_fails_batches_are_copied_once_more_and_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(page_locks, "_has_failed", False)
    monkeypatch.setattr(sim, "refuses", True)
    with preloader() as loader:
        assert all(low == high for low, high, _ in consumed(loader, epochs=2))
    assert caplog.text.count("page-locking a batch failed") == 1


def test_an_error_that_the_driver_reports_after_it_has_locked_leaves_nothing_locked(monkeypatch):
    register = sim._register
    monkeypatch.setattr(page_locks, "_has_failed", False)
    monkeypatch.setattr(
        torch.sim, "cudart", lambda: SimpleNamespace(cudaHostRegister=late, cudaHostUnregister=sim._unregister)
    )

    def late(*arguments):
        register(*arguments)
        return 719  # of an earlier kernel

    with preloader() as loader:
        assert all(low == high for low, high, _ in consumed(loader))
        assert not locked()


class Hazardous(Rows):
    """Reading sample 30 removes the file `folder/kind`, and fails as that says."""

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, index):
        for kind in self.folder.iterdir() if index == 30 else ():
            kind.unlink()
            if kind.name == "skip":
                raise ValueError
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("hazard", ["kill", "skip", "streams", "many held"])
def test_a_killed_worker_a_skipped_sample_streams_and_many_held_batches_change_no_byte(hazard, tmp_path):
    dataset = Hazardous(tmp_path)
    settings = {"on_error": "skip"}
    if hazard == "streams":
        dataset = Streamed(Rows())
        settings = {"streams": 2}
    sim.copy_seconds = 0.005
    with preloader(dataset, depth=12 if hazard == "many held" else 2, **settings) as loader:
        expected = [*range(ROWS)]
        for epoch in range(2):
            if epoch == 1 and hazard in ("kill", "skip"):
                (tmp_path / hazard).touch()
            if epoch == 1 and hazard == "skip":
                expected.remove(30)
            batches = consumed(loader)
            assert all(low == high == [2 * label for label in labels] for low, high, labels in batches)
            assert sorted(label for _, _, labels in batches for label in labels) == expected
            assert locked(), "slots are locked now"
    assert not [*tmp_path.iterdir()], "the hazard has happened"


def fork(loader):
    child = os.fork()
    if child == 0:
        loader.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_that_is_forked_unlocks_nothing_and_other_workers_change_nothing():
    with preloader() as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            results = []
            for number, batch in enumerate(loader):
                results.append(batch["x"] - 2 * batch["label"][:, None])
                if number == 5:
                    fork(loader)
                if number == 7:
                    with preloader(seed=5) as evaluation:  # forks workers
                        assert all(low == high for low, high, _ in consumed(evaluation))
            for thread in threading.enumerate():
                if thread.name == "preloader":
                    thread.join(60)
            fork(loader)  # no batch is held any more: the child unmaps all slots
            assert not any(result.cpu().any() for result in results)


def test_a_loader_that_is_closed_or_dropped_under_a_preloader_unlocks_when_the_copies_are_done():
    sim.copy_seconds = 0.01
    for ends in ("close", "drop", "close the inner one", "another thread closes"):
        loader = preloader(depth=4)
        iterator = iter(loader)
        batches = [next(iterator)]
        if ends == "close":
            loader.close()
        elif ends == "close the inner one":
            loader.loader.close()
        elif ends == "another thread closes":
            closing = threading.Thread(target=loader.close)
            closing.start()
            with suppress(RuntimeError):  # it is closed
                batches.extend(iterator)
            closing.join(60)
        del loader, iterator
        assert all(map(is_doubled, batches))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a finaliser
@pytest.mark.parametrize("count", [5, pytest.param(150, marks=pytest.mark.slow)])
def test_an_interrupt_at_depth_0_neither_loses_a_lock_nor_drops_a_batch_that_is_being_copied(count, monkeypatch):
    monkeypatch.setattr(strikes, "FRAGILE", {*strikes.FRAGILE, sim.__file__, streams.__file__})
    with preloader(depth=0) as loader:
        consumed(loader)  # torch imports much then
        iterator = iter(loader)
        most = moments_of(lambda: next(iterator))
    for number in range(count):
        with preloader(Sizes(), depth=0, shuffle=False, prefetch_factor=1) as loader:
            results = []
            for place in range(5):
                try:
                    with struck(1 + number * most // count if place == number % 5 else 0):
                        for batch in loader:
                            results.append(batch)
                            break
                except Interrupted:
                    break  # and the loader is closed at once
            for batch in results:
                assert is_doubled(batch)
