"""What WorkerLoader promises beyond the contract of all loaders (test_contract.py), with and without a seed."""

import multiprocessing
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter, methodcaller

import numpy as np
import pytest
import torch
from example_datasets import Noisy, Numbers, Waiting, contents, plain, rows

from loaders import WorkerLoader
from loaders.machine import available_cores


def epochs(loader, count=2):
    with loader:
        return [contents(loader) for _ in range(count)]


# Bytes


def test_auto_takes_a_worker_for_each_core_and_the_bytes_are_the_same():
    loader = WorkerLoader(Noisy(20), 3, seed=7, num_workers="auto", prefetch_factor="auto")
    assert loader.num_workers == available_cores()
    assert epochs(loader) == epochs(WorkerLoader(Noisy(20), 3, seed=7))


@dataclass
class Part:
    level: object
    size: float = float("nan")


class Slotted:
    __slots__ = ("level",)

    def __init__(self, level):
        self.level = level


class Levelled(Numbers):
    """Each sample is the process that read it, and the level of its part."""

    kind = 1

    def __init__(self, part, level):
        super().__init__(4)
        self.odd = [
            torch.zeros(2).to_sparse(),
            torch.nested.nested_tensor([torch.ones(1)]),
            torch.ones(2).conj(),
            np.nan,
        ]
        self.parts = [part]
        self.level = level
        self.read = multiprocessing.Semaphore(0)

    def __getitem__(self, index):
        level = float(self.kind * self.level(self.parts[0]))
        self.read.release()
        return os.getpid(), level


def set_level(part):
    part.level = 2


level = attrgetter("level")
first = itemgetter(0)
fill = methodcaller("fill_", 2)


def draw_again(pairs):
    """New objects get the addresses of those that are gone."""
    pairs.clear()
    for number in range(1000):
        pairs.append((number, 2))


LEVELS = {  # a part of a dataset, its level, and what changes that to 2, or returns what takes its place
    "number": (lambda: Part(1), level, set_level),
    "private": (lambda: Part(1), lambda part: getattr(part, "_level", 1), lambda part: setattr(part, "_level", 2)),
    "numpy's number": (lambda: np.float32(1), float, lambda part: np.float32(2)),
    "item of an array": (lambda: np.ones(60_000), itemgetter(77), methodcaller("__setitem__", 77, 2)),
    "item of a tensor": (lambda: torch.ones(3, 2), itemgetter((0, 1)), fill),
    "another large array": (
        lambda: np.ones(70_000),
        itemgetter(1),
        lambda part: np.concatenate([part[:1], [2], part[2:]]),
    ),
    "another large tensor": (
        lambda: torch.ones(70_000),
        itemgetter(1),
        lambda part: torch.cat([part[:1], torch.tensor([2]), part[2:]]),
    ),
    "shared value": (
        lambda: multiprocessing.Value("i", 1),
        attrgetter("value"),
        methodcaller("__setattr__", "value", 2),
    ),
    "shared array": (
        lambda: np.frombuffer(multiprocessing.RawArray("b", b"\1"), np.int8),
        first,
        methodcaller("fill", 2),
    ),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(2)), first, lambda part: torch.nn.init.constant_(part, 2)),
    "bfloat16": (lambda: torch.ones(3).bfloat16(), first, fill),
    "tuple": (lambda: (Part((0, 1)),), lambda part: part[0].level[1], lambda part: setattr(part[0], "level", (0, 2))),
    "slot": (lambda: Slotted(1), level, set_level),
    "object": (lambda: Part(1), level, lambda part: Part(2)),
    "function": (lambda: lambda: 1, lambda part: part(), lambda part: lambda: 2),
    "deque": (lambda: deque([{"a": 1}]), lambda part: part[0]["a"], lambda part: part[0].update(a=2)),
    "long list": (lambda: [1] * 1000, itemgetter(-1), methodcaller("__setitem__", -1, 2)),
    "long list in place": (lambda: [(number, 1) for number in range(1000)], lambda part: part[-1][1], draw_again),
    "class": (lambda: 1, float, lambda part: setattr(Levelled, "kind", 2)),
}


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
@pytest.mark.parametrize("attribute", LEVELS)
def test_workers_get_what_has_changed_between_two_epochs_and_restart_only_for_it(
    attribute, method, monkeypatch, bound
):
    make, level, change = LEVELS[attribute]
    monkeypatch.setattr(Levelled, "kind", 1)
    dataset = Levelled(make(), level)
    with WorkerLoader(dataset, 4, seed=0, num_workers=1, persistent_workers=True, worker_method=method) as loader:
        (before,) = loader
        vars(dataset)  # Python may make this dict only now, which changes nothing
        (unchanged,) = loader
        for _ in range(4 * 4):  # the next two epochs are loaded ahead
            assert dataset.read.acquire(timeout=bound)
        replacement = change(dataset.parts[0])
        if replacement is not None:
            dataset.parts[0] = replacement
        (changed,) = loader
    assert [levels.tolist() for _, levels in (before, unchanged, changed)] == [[1] * 4, [1] * 4, [2] * 4]
    assert before[0].tolist() == unchanged[0].tolist()


class Scaled:
    scale = 1

    def __call__(self, samples):
        return torch.tensor(samples) * self.scale


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_workers_get_what_has_changed_in_collate_fn_between_two_epochs(method):
    collate = Scaled()
    settings = {"num_workers": 1, "persistent_workers": True, "worker_method": method, "collate_fn": collate}
    with WorkerLoader(range(1, 5), 4, seed=0, **settings) as loader:
        (before,) = loader
        collate.scale = 3
        (changed,) = loader
    assert before.tolist() == [1, 2, 3, 4] and changed.tolist() == [3, 6, 9, 12]


class Program:
    """Trains, and has a method that makes batches."""

    def __init__(self):
        self.step = 0

    def collate(self, samples):
        return torch.tensor(samples)


def test_another_collate_fn_counts_from_the_next_epoch_on_without_workers():
    with WorkerLoader(range(4), 2, seed=0, persistent_workers=True) as loader:
        assert contents(loader) == [[0, 1], [2, 3]]
        loader.collate_fn = sum
        assert list(loader) == [1, 5]


def test_workers_stay_while_the_object_of_a_collate_fn_that_is_its_method_changes():
    program = Program()
    with WorkerLoader(
        range(4), 4, num_workers=1, persistent_workers=True, collate_fn=program.collate, seed=0
    ) as loader:
        pids = []
        for _ in range(3):
            list(loader)
            program.step += 1
            pids.append([worker.pid for worker in multiprocessing.active_children()])
    assert pids[0] == pids[1] == pids[2]


# Without a seed: torch's order, and numbers that repeat under manual_seed


@pytest.mark.parametrize("persistent", [False, True])
def test_without_a_seed_a_program_repeats_itself_and_no_two_epochs_or_batches_draw_the_same(persistent):
    def noise(workers):
        torch.manual_seed(5)
        settings = {"shuffle": True, "num_workers": workers, "persistent_workers": persistent}
        return epochs(WorkerLoader(Noisy(24), 4, **settings), 3)

    first = noise(1)
    assert noise(3) == first
    draws = [draw for epoch in first for batch in epoch for row in batch["noise"] for draw in row]
    assert len(set(draws)) == 3 * 3 * 24


# What is loaded ahead


class Started(Numbers):
    """Counts the samples that worker threads have begun to read beyond those that the consumer has asked for."""

    def __init__(self):
        super().__init__(60)
        self.begun = 0
        self.asked_for = 0
        self.most = 0
        self.progress = threading.Condition()

    def __getitem__(self, index):
        with self.progress:
            self.begun += 1
            self.most = max(self.most, self.begun - self.asked_for)
            self.progress.notify_all()
        return index


@pytest.mark.parametrize(("settings", "depth"), [({}, 4), ({"prefetch_factor": 4}, 8), ({"num_workers": 0}, 0)])
def test_as_many_batches_are_loaded_ahead_as_was_asked_for(settings, depth, seed, bound):
    dataset = Started()
    settings = {"num_workers": 2, "worker_method": "thread", **settings}
    with WorkerLoader(dataset, 1, seed=seed, **settings) as loader:
        iterator = iter(loader)
        for ahead in [depth] + [depth - 1] * 20:  # a task may wait until the consumer has dropped its batch
            with dataset.progress:
                assert dataset.progress.wait_for(lambda at=dataset.asked_for + ahead: dataset.begun >= at, bound)
                dataset.asked_for += 1
            next(iterator)
    assert dataset.most == depth


class Ahead(Numbers):
    """Sample i is 100 kB, full of how many more samples a worker has begun than the consumer has asked for."""

    def __init__(self):
        super().__init__(24)
        self.begun = multiprocessing.Semaphore(0)
        self.asked_for = multiprocessing.RawValue("q", 0)
        self.count = 0

    def __getitem__(self, index):
        self.count += 1
        lead = self.count - self.asked_for.value
        self.begun.release()
        return torch.full((100_000,), lead, dtype=torch.uint8)


@pytest.mark.parametrize(("fit", "depth"), [(0.5, 1), (2.5, 2), (99, 4)])
def test_with_prefetch_factor_auto_what_is_loaded_ahead_takes_an_eighth_of_the_memory(
    fit, depth, method, monkeypatch, bound
):
    monkeypatch.setattr("loaders.workers.engine.available_memory", lambda: int(8 * fit * 100_000))
    dataset = Ahead()
    leads = []
    begun = 0
    settings = {"num_workers": 1, "worker_method": method, "prefetch_factor": "auto"}
    with WorkerLoader(dataset, 1, seed=0, **settings) as loader:
        iterator = iter(loader)
        for number in range(24):
            while begun < min(24, number + (depth if number else 1)):  # at first the size of a batch is not known
                assert dataset.begun.acquire(timeout=bound)
                begun += 1
            dataset.asked_for.value += 1
            leads.append(next(iterator).max().item())
    assert max(leads) == depth


class Counted(Numbers):
    """Counts the samples that were begun, which changes none of its attributes."""

    def __init__(self):
        super().__init__(60)
        self.begun = multiprocessing.Semaphore(0)

    def __getitem__(self, index):
        self.begun.release()
        return index


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_the_next_epochs_first_batches_are_loaded_while_the_loop_evaluates(method, bound):
    dataset = Counted()
    with WorkerLoader(dataset, 4, num_workers=2, worker_method=method, seed=0, persistent_workers=True) as loader:
        list(loader)
        for _ in range(60 + 4 * 4):
            assert dataset.begun.acquire(timeout=bound)
        assert len(list(loader)) == 15
    assert dataset.begun.get_value() <= 60 + 4, "what was loaded ahead was used"


# What else a loader does


def test_out_of_order_an_epoch_has_its_own_batches_only_in_another_order_and_no_state(seed):
    settings = {"num_workers": 2, "in_order": False, "seed": seed, "persistent_workers": True}
    with WorkerLoader(Waiting(12, 10), 2, sampler=range(11, -1, -1), **settings) as loader:
        for epoch in range(3):
            iterator = iter(loader)
            first = plain(next(iterator))
            loader.dataset.go.set()
            batches = [first, *contents(iterator)]
            assert sorted(batches) == [[at + 1, at] for at in range(0, 12, 2)]
            assert epoch or first != [11, 10]
        if seed is not None:
            with pytest.raises(ValueError, match="in_order=False"):
                loader.state_dict()


def test_out_of_order_an_epoch_that_is_named_again_begins_anew():
    settings = {"num_workers": 2, "in_order": False, "seed": 0, "persistent_workers": True}
    with WorkerLoader(Numbers(40), 4, **settings) as loader:
        for taken in range(3):
            loader.set_epoch(0)
            assert len(list(islice(loader, taken))) == taken
            loader.set_epoch(0)
            assert sorted(rows(loader)) == list(range(40))


def test_any_number_of_batches_may_be_loaded_ahead(seed, in_thread, bound):
    with WorkerLoader(Numbers(1500), 1, num_workers=1, prefetch_factor=1000, seed=seed) as loader:
        assert in_thread(rows, loader).result(bound) == list(range(1500))


def test_without_batching_each_sample_is_a_batch(reader):
    with WorkerLoader(Numbers(3), None, seed=0, **reader) as loader:
        assert len(loader) == 3
        assert [list(loader) for _ in range(2)] == [[0, 1, 2]] * 2


def test_the_figures_of_an_epoch_can_be_read_after_it_although_its_workers_have_gone(seed, num_workers):
    with WorkerLoader(Numbers(6), 2, seed=seed, num_workers=num_workers) as loader:
        for _ in range(2):
            began = time.perf_counter()
            list(loader)
            if seed is not None or num_workers:  # else all is torch's
                figures = loader.stats()["workers"]
                seconds = time.perf_counter() - began
                assert figures["batches"] == 3 and figures["mean_queued"] == figures["queued"] / 3
                assert (figures["active_workers"], figures["bytes"]) == (num_workers, 6 * 8 * num_workers)
                assert figures["copied_batches"] == figures["deaths"] == figures["skipped_samples"] == 0
                assert 0 < (busy := figures["worker_busy_seconds"]) < seconds and 0 < figures["wait_seconds"] < seconds
                for part in ("cpu", "queued", "collate"):
                    assert 0 <= figures[f"worker_{part}_seconds"] <= busy + 1e-3, part
    assert loader.stats() == {}
