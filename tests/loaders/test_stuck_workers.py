"""Workers that stop or block where the parent would have to wait for them: none of it holds up next()."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from example_datasets import Numbers, contents

from loaders import WorkerLoader


def wait_until(condition: Callable[[], bool], bound: float) -> None:
    until = time.monotonic() + bound
    while not condition():
        assert time.monotonic() < until, "what should happen did not"
        threading.Event().wait(0.01)


def is_waiting(pid: int) -> bool:
    """Whether the process sleeps, as one does that reads from or writes to a pipe."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


class Counted(Numbers):
    """Counts the batches that its only worker has read."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.batches = multiprocessing.RawValue("q", 0)


class Indices(Counted):
    """The samples are their indices, read by whole batches."""

    def sample_spec(self) -> dict:
        return {"index": ((), torch.int64)}

    def read_batch(self, indices, out, random) -> None:
        out["index"].copy_(torch.from_numpy(indices))
        self.batches.value += 1

    def __getitems__(self, indices: list[int]) -> list[dict]:
        samples = [{"index": index} for index in indices]
        self.batches.value += 1
        return samples


class Objects(Counted):
    """Each sample is a megabyte of text."""

    def __getitem__(self, index: int) -> str:
        text = f"{index:08}" * (1 << 17)
        if index % 4 == 3:
            self.batches.value += 1
        return text


def test_a_stopped_worker_that_should_receive_a_large_task_is_replaced_after_the_timeout(in_thread, bound):
    size = 150_000  # indices a batch: more than a megabyte, and than any pipe holds
    dataset = Indices(6 * size)
    with WorkerLoader(dataset, size, num_workers=1, prefetch_factor=1, seed=0, timeout=1) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        (worker,) = iterator._workers
        wait_until(lambda: dataset.batches.value == 2 and is_waiting(worker.pid), bound)
        os.kill(worker.pid, signal.SIGSTOP)  # it has nothing to do, and the next next() sends it a task
        batches += in_thread(list, iterator).result(bound)
    assert len(batches) == 6
    for number, batch in enumerate(batches):
        assert torch.equal(batch["index"], torch.arange(number * size, (number + 1) * size))


def stopped_in_an_answer(loader: WorkerLoader, bound: float) -> tuple:
    """The rest of an epoch, its first batch, and its worker, stopped in an answer that is larger than any pipe."""
    iterator = iter(loader)
    first = next(iterator)
    (worker,) = iterator._workers
    wait_until(lambda: loader.dataset.batches.value == 2 and is_waiting(worker.pid), bound)
    os.kill(worker.pid, signal.SIGSTOP)
    return iterator, first, worker


def test_a_worker_stopped_in_a_large_answer_is_replaced_after_the_timeout(in_thread, bound):
    settings = {"num_workers": 1, "prefetch_factor": 1, "timeout": 1, "collate_fn": list}
    with WorkerLoader(Objects(16), 4, **settings) as loader:
        iterator, first, _ = stopped_in_an_answer(loader, bound)
        batches = [first, *in_thread(list, iterator).result(bound)]
    assert [int(text[:8]) for batch in batches for text in batch] == list(range(16))
    assert all(len(text) == 1 << 20 for batch in batches for text in batch)


def test_close_does_not_wait_for_a_worker_stopped_in_a_large_answer(in_thread, bound):
    loader = WorkerLoader(Objects(16), 4, num_workers=1, prefetch_factor=1, seed=0, collate_fn=list)
    _, _, worker = stopped_in_an_answer(loader, bound)
    in_thread(loader.close).result(bound / 3)
    assert worker.exitcode == -signal.SIGKILL


class HangsOnce:
    """A worker_init_fn that hangs the second time that worker 0 starts."""

    def __init__(self) -> None:
        self.starts = multiprocessing.RawValue("q", 0)

    def __call__(self, worker: int) -> None:
        if worker == 0:
            self.starts.value += 1
            if self.starts.value == 2:
                threading.Event().wait()


@pytest.mark.parametrize("seed", [0, None])
def test_a_restarted_worker_that_hangs_in_its_setup_is_restarted_again_without_a_timeout(
    seed, in_thread, bound, monkeypatch
):
    from loaders.workers import process_pool

    monkeypatch.setattr(process_pool, "START_SECONDS", 1.0)
    hangs_once = HangsOnce()
    settings = {"num_workers": 2, "seed": seed, "worker_init_fn": hangs_once, "max_restarts": 10}
    with WorkerLoader(Numbers(400), 4, **settings) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        iterator._workers[0].kill()
        batches += in_thread(list, iterator).result(bound / 3)
    assert contents(batches) == [list(range(start, start + 4)) for start in range(0, 400, 4)]
    assert hangs_once.starts.value >= 3
