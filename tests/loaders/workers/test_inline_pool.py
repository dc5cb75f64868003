"""num_workers=0: a task is read when its result is asked for, in the thread that asks."""

import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from loaders.workers import thread_pool
from loaders.workers.inline_pool import InlinePool
from loaders.workers.pool import Result
from loaders.workers.reader import Reader, spec_of
from loaders.workers.tasks import Task


class Draws:
    """Sample i is i and a draw from each global generator; notes who reads."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def __getitem__(self, index: int) -> list[float]:
        self.read.append((index, threading.get_ident()))
        if index < 0:
            raise IndexError(f"no sample {index}")
        return [index, random.random(), np.random.random(), torch.rand(()).item()]


class Written(Draws):
    def sample_spec(self) -> dict:
        return {"index": ((), torch.int64)}

    def read_batch(self, indices, out, random) -> None:
        out["index"].copy_(torch.from_numpy(indices))


def pool_of(dataset, seed: int | None = 1) -> InlinePool:
    return InlinePool(Reader(dataset, default_collate, True, seed, spec_of(dataset), False))


def task(*indices: int) -> Task:
    return Task(list(indices), 0, 0, np.arange(len(indices)))


def answer(pool: InlinePool) -> Result:
    """The next result."""
    pool.wait()
    return pool.events.popleft()


def states() -> list:
    _, words, place, *_ = np.random.get_state()
    return [random.getstate(), (words.tolist(), place), torch.get_rng_state().tolist()]


def test_tasks_are_read_in_order_and_only_when_a_result_is_asked_for():
    dataset = Draws()
    pool = pool_of(dataset)
    assert pool.submit(0, 5, task(1, 2), None, [])
    assert pool.submit(0, 6, task(3), None, [])
    assert dataset.read == []
    result = answer(pool)
    assert (result.number, [index for index, _ in dataset.read]) == (5, [1, 2])
    batch = pool.open(result, None).batch
    assert batch[0].tolist() == [1, 2]
    result = answer(pool)
    assert result.number == 6
    assert {thread for _, thread in dataset.read} == {threading.get_ident()}


def test_an_error_is_the_datasets_own():
    pool = pool_of(Draws())
    pool.submit(0, 0, task(-1), None, [])
    result = answer(pool)
    assert str(result.error) == "no sample -1"
    assert result.payload is None


def test_a_batchs_bytes_and_seconds_are_counted():
    pool = pool_of(Written())
    pool.submit(0, 0, task(1, 2, 3), None, [])
    result = answer(pool)
    assert result.needed == 64
    assert 0 < result.work.seconds < 60
    assert 0 <= result.work.wait_seconds < 60


def test_seeded_reading_leaves_the_global_generators_as_they_were():
    pool = pool_of(Draws())
    before = states()
    drawn = []
    for number in range(2):
        pool.submit(0, number, task(1), None, [])
        random.random()  # the training loop's own draws change nothing
        result = answer(pool)
        drawn.append([part.tolist() for part in result.payload.batch])
    assert drawn[0] == drawn[1]
    random.setstate(before[0])
    assert states() == before


def test_unseeded_reading_draws_from_the_global_generators():
    pool = pool_of(Draws(), seed=None)
    before = states()
    pool.submit(0, 0, task(1), None, [])
    answer(pool)
    assert all(now != then for now, then in zip(states(), before, strict=True))


def test_another_thread_than_the_epochs_does_not_seed(in_thread, bound, caplog):
    if hasattr(thread_pool.warn_of_unseeded_reading, "cache_clear"):
        thread_pool.warn_of_unseeded_reading.cache_clear()
    pool = pool_of(Draws())
    pool.submit(0, 0, task(1), None, [])
    random.seed(4)
    expected = random.random()
    random.seed(4)
    result = in_thread(answer, pool).result(bound)
    assert result.payload.batch[1].item() == expected
    assert len(caplog.records) == 1
    in_thread(pool.begin).result(bound)  # that thread's epoch begins: now this one is another
    pool.submit(0, 0, task(1), None, [])
    before = states()
    answer(pool)
    assert states() != before


def test_reading_with_read_batch_in_another_thread_warns_of_nothing(in_thread, bound, caplog):
    pool = pool_of(Written())
    pool.submit(0, 0, task(1, 2), None, [])
    result = in_thread(answer, pool).result(bound)
    assert result.payload.batch["index"].tolist() == [1, 2]
    assert caplog.records == []


def test_an_interrupted_reading_is_done_again(monkeypatch):
    pool, interrupts = pool_of(Draws()), [KeyboardInterrupt]
    read = Draws.__getitem__

    def interrupted(dataset: Draws, index: int) -> list[float]:
        if interrupts:
            raise interrupts.pop()
        return read(dataset, index)

    monkeypatch.setattr(Draws, "__getitem__", interrupted)
    before = states()
    pool.submit(0, 3, task(1), None, [])
    with pytest.raises(KeyboardInterrupt):
        pool.wait()
    assert not pool.events
    assert (answer(pool).number, states()) == (3, before)


def test_close_forgets_the_tasks():
    pool = pool_of(Draws())
    pool.submit(0, 0, task(1), None, [])
    pool.close()
    pool.wait()
    assert not pool.events


def test_an_inline_pool_is_one_worker_without_processes_and_slots():
    pool = pool_of(Draws())
    assert (pool.num_workers, pool.processes, pool.writes_to_slots) == (1, [], False)
