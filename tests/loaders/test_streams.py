"""Iterable datasets: logical streams with a seed, whatever reads them, and torch's own behaviour without one."""

import gc
import json
import logging
import os
import random
import re
import select
from itertools import chain, cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from strikes import Interrupted, moments_of, struck
from torch.utils.data import IterableDataset, get_worker_info

from loaders import Preloader, StreamError, WorkerLoader, merge_states

SAMPLES = 60


class Numbers(IterableDataset):
    """Streams of uneven length. A sample is its number, and three random ones."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.samples - first, step):
            yield self.sample(number)

    def sample(self, number: int) -> torch.Tensor:
        drawn = random.randrange(1000), np.random.randint(1000), int(torch.randint(1000, ()))
        return torch.tensor([number, *drawn])


class Stateful(Numbers):
    """It is its own iterator, with a state, and has another order in each epoch."""

    def __iter__(self):
        info = get_worker_info()
        assert info.dataset is self
        self.numbers = list(range(info.id, self.samples - info.id, info.num_workers))
        self.at = getattr(self, "at", 0)
        random.Random(self.epoch).shuffle(self.numbers)
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __next__(self):
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.sample(self.numbers[self.at - 1])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Rewinding(Stateful):
    """At its end its state is that of its beginning."""

    def __next__(self):
        try:
            return super().__next__()
        except StopIteration:
            self.at = 0
            raise


class Failing(Stateful):
    """Every seventh sample is an error, and the iterator goes on after it."""

    def sample(self, number: int) -> torch.Tensor:
        if number % 7 == 0:
            raise KeyError(number)
        return super().sample(number)


class Refilled(Numbers):
    """Its state lacks its buffer, as Hugging Face's does."""

    buffer_size = 4

    def __iter__(self):
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == self.buffer_size:
                yield buffer.pop(random.randrange(4))
        yield from buffer

    def state_dict(self):
        raise AssertionError("it is not exact")

    load_state_dict = state_dict


def seen(batches) -> list:
    """What a consumer gets, errors in their places."""
    found, iterator = [], iter(batches)
    while True:
        try:
            found.append(next(iterator).tolist())
        except StopIteration:
            return found
        except KeyError as error:
            found.append(str(error).split()[-1])


def loader_of(dataset, workers: int, **settings) -> WorkerLoader:
    usual = {"batch_size": 3, "seed": 5, "streams": 4, "num_workers": workers, "persistent_workers": workers > 0}
    return WorkerLoader(dataset, **usual | settings)


def with_a_draw(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + 1000 * torch.randint(1000, ())


VARIANTS = [
    (Numbers, {"steps_per_epoch": 9, "drop_last": True, "batch_size": 4}),
    (Failing, {"steps_per_epoch": 9, "shuffle_buffer": 5}),
    (Stateful, {"shuffle_buffer": 5, "collate_fn": with_a_draw}),
    (Refilled, {"steps_per_epoch": 9}),
    (Rewinding, {"shuffle_buffer": 4}),
    *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in (Numbers, Failing, Stateful, Refilled)),
]


@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_kills_resumes_and_other_numbers_of_workers_change_no_byte(kind, settings):
    with loader_of(kind(), 0, **settings) as loader:
        epochs = [seen(loader) for _ in range(3)]
    assert len(set(map(str, epochs))) == 3, "each has its own random numbers"
    assert "drop_last" not in settings or {len(batch) for batch in chain(*epochs)} == {4}
    draw = random.Random(str((kind.__name__, settings)))
    state, epoch, got = None, 0, []
    while epoch < 3:
        with loader_of(kind(), draw.choice((0, 1, 2, 3)), **settings) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            iterator = iter(loader)
            for _ in range(draw.randrange(1, 10)):
                if iterator._workers and draw.random() < 0.3:
                    draw.choice(iterator._workers).kill()
                try:
                    got.append(next(iterator).tolist())
                except KeyError as error:
                    got.append(str(error).split()[-1])
                except StopIteration:
                    break
            state = loader.state_dict()
            if state["epoch"] > epoch:
                assert got == epochs[epoch]
                epoch, got = epoch + 1, []


class Shards(IterableDataset):
    """Gives each stream whole shards of four samples; there may be too few of them, or none."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def __iter__(self):
        info = get_worker_info()
        for shard in range(info.id, self.shards, info.num_workers):
            yield from range(4 * shard, 4 * shard + 4)


class WithLambda(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.transform = lambda sample: sample


def numbers(batches) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in batches]


@pytest.mark.parametrize(("prefetch_factor", "persistent"), [(1, True), (3, False)])
def test_an_epoch_that_was_left_takes_no_sample_from_the_next_one(prefetch_factor, persistent):
    with loader_of(Numbers(), 0) as loader:
        expected = [numbers(loader) for _ in range(6)]
    with loader_of(Numbers(), 3, prefetch_factor=prefetch_factor, persistent_workers=persistent) as loader:
        for epoch, left_after in enumerate((0, 1, 2, 5, 1, 9)):
            batches = iter(loader)
            for _ in range(left_after):
                next(batches)
            loader.set_epoch(epoch)
            assert numbers(loader) == expected[epoch]


def test_ranks_share_the_streams_and_a_merged_state_resumes_on_any_number_of_them():
    with loader_of(Numbers(), 0) as loader:
        iterator = iter(loader)
        alone = numbers(next(iterator) for _ in range(8))
        rest = numbers(iterator)
    loaders = [loader_of(Numbers(), rank, rank=rank, world_size=2) for rank in range(2)]
    iterators = list(map(iter, loaders))
    together = [numbers([next(iterator)])[0] for _ in range(4) for iterator in iterators]
    assert together == alone, "the batches of a step are those of two steps of one rank"
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    for ranks in (1, 2, 4):
        got = []
        for rank in range(ranks):
            with loader_of(Numbers(), ranks - 1, batch_size=6 // ranks, rank=rank, world_size=ranks) as loader:
                loader.load_state_dict(merge_states(states))
                got += numbers(loader)
        assert sorted(chain(*got)) == sorted(chain(*rest))
    with loader_of(Numbers(), 0) as loader, pytest.raises(ValueError, match=r"lacks the streams 1, 3 .*merge_states"):
        loader.load_state_dict(states[0])
    for loader in loaders:
        loader.close()


def test_errors_are_skipped_where_the_iterator_goes_on_after_them():
    for workers in (0, 2):
        with loader_of(Failing(), workers, on_error="skip") as loader:
            got = sorted(chain(*numbers(loader)))
            assert got == [number for number in all_numbers() if number % 7]
            skipped = loader.stats()["workers"]["skipped_samples"]
            assert skipped == sum(number % 7 == 0 for number in all_numbers())


class Closed(Numbers):
    """One of its streams cannot be opened."""

    def __iter__(self):
        if get_worker_info().id == 1:
            raise KeyError("no file")
        return super().__iter__()


def test_a_stream_that_cannot_be_opened_is_one_error_with_any_number_of_workers():
    inline, *others = (seen(loader_of(Closed(), workers)) for workers in (0, 1, 3))
    assert [inline, inline] == others
    assert [batch for batch in inline if isinstance(batch, str)] == ["file'"]


def all_numbers() -> list[int]:
    return sorted(number for first in range(4) for number in range(first, SAMPLES - first, 4))


def test_a_resume_without_a_state_of_the_dataset_says_how_much_it_read_and_dropped(caplog):
    with loader_of(Numbers(), 0) as loader:
        batches = seen(loader)
        next(iter(loader))
        state = loader.state_dict()
    with caplog.at_level(logging.INFO), loader_of(Numbers(), 0) as loader:
        loader.load_state_dict(state)
        assert len(seen(loader)) == len(batches) - 1
    assert "stream 0 read and dropped 3 samples in" in caplog.text


class OtherState(Numbers):
    """Has methods of these names that mean something else."""

    def state_dict(self, num_samples, from_beginning):
        raise AssertionError("it is not the loader's to call")

    def load_state_dict(self, state):
        raise AssertionError("it is not the loader's to call")


@pytest.mark.parametrize(("kind", "settings"), [(Stateful, {}), (Stateful, {"shuffle_buffer": 4}), (OtherState, {})])
def test_a_dataset_with_a_state_of_its_own_reads_at_most_a_block_again(kind, settings, caplog):
    with loader_of(kind(), 0, **settings) as loader:
        batches = seen(loader)
        loader.set_epoch(0)
        iterator = iter(loader)
        for _ in range(14):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    with caplog.at_level(logging.INFO), loader_of(kind(), 0, **settings) as loader:
        loader.load_state_dict(state)
        assert seen(loader) == batches[14:]
    dropped = sum(int(count) for count in re.findall(r"read and dropped (\d+) samples", caplog.text))
    read = sum(place["samples"] for place in state["places"].values())
    if kind is OtherState:
        assert dropped == read
    else:
        assert dropped <= 4 * (settings.get("shuffle_buffer", 1) - 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_without_samples_are_passed_over_and_none_at_all_is_an_error(workers):
    with loader_of(Shards(3), workers, steps_per_epoch=20) as loader:
        assert sorted({number for batch in loader for number in batch.tolist()}) == list(range(12))
    for settings in ({}, {"steps_per_epoch": 4}, {"steps_per_epoch": 4, "drop_last": True, "batch_size": 5}):
        dataset = Shards(4 if "drop_last" in settings else 0)
        with loader_of(dataset, workers, **settings) as loader, pytest.raises(StreamError, match="gave no batch"):
            list(loader)


@pytest.mark.parametrize("depth", [0, 2])
def test_streams_go_on_where_the_preloaders_consumer_was_after_a_break_and_after_a_resume(depth):
    settings = {"steps_per_epoch": 9, "shuffle_buffer": 4}
    with loader_of(Numbers(), 0, **settings) as loader:
        expected = seen(loader) + seen(loader)
    with Preloader(loader_of(Numbers(), 2, **settings), "cpu", depth) as loader:
        got = [batch.tolist() for count in (2, 4, 1, 4) for _, batch in zip(range(count), loader, strict=False)]
        state = loader.state_dict()
    with Preloader(loader_of(Numbers(), 1, **settings), "cpu", depth) as loader:
        loader.load_state_dict(state)
        assert got + [next(loader).tolist() for _ in range(4)] == expected[:15]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a __del__
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Numbers, {}),
        (Stateful, {"shuffle_buffer": 7}),
        (Stateful, {"steps_per_epoch": 90, "on_error": "skip"}),
    ],
)
def test_an_interrupt_inside_next_loses_no_sample(kind, settings):
    with loader_of(kind(150), 0, **settings) as loader:
        expected = seen(loader)
        loader.set_epoch(0)
        most = moments_of(lambda: next(loader))
    with loader_of(kind(150), 0, **settings) as loader:
        iterator, got = iter(loader), []
        for number, error in enumerate(islice(cycle((Interrupted, TimeoutError)), 2 * len(expected))):
            try:
                with struck(1 + 7 * number % most, error):
                    for batch in iterator:  # not next(): the strike may come after its return, when it is the test's
                        got.append(batch.tolist())
                        break
            except error:
                pass
        assert got + seen(iterator) == expected


class CleaningUp(Numbers):
    """Makes a file when its generator ends."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def __iter__(self):
        try:
            yield from super().__iter__()
        finally:
            self.file.touch()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_generator_that_is_left_early_runs_its_finally_when_the_loader_is_closed(num_workers, tmp_path):
    gc.disable()
    try:
        with WorkerLoader(CleaningUp(tmp_path / "file"), 4, num_workers=num_workers, seed=0) as loader:
            next(iter(loader))
        assert (tmp_path / "file").exists()
    finally:
        gc.enable()


class Announced(Numbers):
    """Writes a byte to a pipe when it is opened."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self.pipe = pipe

    def __iter__(self):
        os.write(self.pipe, b".")
        return super().__iter__()


def test_the_first_batches_of_the_next_epoch_are_loaded_ahead(bound):
    reading, writing = os.pipe()
    plain = WorkerLoader(Numbers(), 4, num_workers=0, seed=0, streams=1)
    expected = [numbers(plain) for _ in range(3)]
    settings = {"num_workers": 1, "streams": 1, "persistent_workers": True}
    with WorkerLoader(Announced(writing), 4, seed=0, **settings) as loader:
        for epoch in range(3):
            assert numbers(loader) == expected[epoch]
            for _ in range(2 if epoch == 0 else 1):  # this epoch, and the one after it
                assert select.select([reading], [], [], bound)[0], "the next epoch's stream is not opened"
                os.read(reading, 1)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: WorkerLoader(Numbers(), 3, seed=0, shuffle=True), "shuffle=True: .* give shuffle_buffer=1000"),
        (lambda: WorkerLoader(Numbers(), 3, seed=0, streams=8, world_size=3), "streams=8 .* give a multiple of 3"),
        (lambda: WorkerLoader(Numbers(), 3, seed=0, streams=0), "streams=0"),
        (lambda: WorkerLoader(Numbers(), 3, seed=0, worker_method="thread"), "'thread' needs a map-style dataset"),
        (lambda: WorkerLoader(Numbers(), 3, shuffle_buffer=8), "needs? a seed"),
        (lambda: WorkerLoader(Numbers(), 3, on_error="skip"), "needs? a seed"),
        (lambda: WorkerLoader(split_by_rank(), 3, seed=0, world_size=2), "is split by rank already"),
        (
            lambda: list(WorkerLoader(WithLambda(), 3, seed=0)),
            "WithLambda cannot be pickled, and each stream .*lambda",
        ),
        (lambda: list(WorkerLoader(Shards(0), 3, seed=0)), "Shards gave no batch"),
        (lambda: list(Preloader(WorkerLoader(Numbers(), 3, seed=0), "cpu", 2)), "cannot be read in a thread"),
        (lambda: len(WorkerLoader(Numbers(), 3, seed=0)), "has no length"),
        (lambda: load(loader_of(Numbers(), 0), loader_of(Numbers(), 0, streams=2)), "streams=2, but .* streams=4"),
        (lambda: load(loader_of(Numbers(9), 0), loader_of(Numbers(), 0)), "stream 1 has ended 1 samples before"),
    ],
)
def test_what_cannot_work_is_refused_in_words(make, said):
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError), match=said):
        make()


def split_by_rank() -> Numbers:
    dataset = Numbers()
    dataset._distributed = "rank 0 of 2"  # as Hugging Face's split_dataset_by_node notes it
    return dataset


def load(loader, other) -> None:
    """Gives the loader the other's state in mid-epoch, and reads on."""
    iterator = iter(other)
    for _ in range(5):
        next(iterator)
    loader.load_state_dict(other.state_dict())
    list(loader)
