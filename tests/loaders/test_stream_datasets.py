"""What an iterable dataset may do with a seed: fail, end, be empty, have a state, clean up; and what is refused."""

import gc
import logging
import random
import re
from functools import partial

import numpy as np
import pytest
import torch
from every_loader import saved
from example_datasets import rows
from example_streams import Numbers, Stateful, loader_of, seen
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from loaders import Preloader, StreamError, WorkerLoader
from loaders.errors import warn_once


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


def test_a_resume_without_a_state_of_the_dataset_says_how_much_it_read_and_dropped(caplog):
    with loader_of(Numbers(), 0) as loader:
        batches = seen(loader)
        next(iter(loader))
        state = loader.state_dict()
    with caplog.at_level(logging.INFO), loader_of(Numbers(), 0) as loader:
        loader.load_state_dict(state)
        assert len(seen(loader)) == len(batches) - 1
    assert "stream 0 read and dropped 3 samples in" in caplog.text


class CountsEpochs(Numbers):
    def __init__(self):
        super().__init__()
        self.epoch = 0

    def __iter__(self):
        yield from super().__iter__()
        self.epoch += 1


class IsTold(CountsEpochs):
    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize(("kind", "warns"), [(CountsEpochs, True), (IsTold, False), (Stateful, False)])
def test_a_stream_that_counts_its_epochs_is_told_that_each_reads_a_new_copy(kind, warns, caplog):
    warn_once.cache_clear()
    with loader_of(kind(), 0) as loader:
        for _ in range(2):
            seen(loader)
    said = [text for text in caplog.messages if "set_epoch" in text]
    assert len(said) == warns and all(f"{kind.__name__}.epoch," in text for text in said)


class Whole(Numbers):
    """Gives all its samples to each stream."""

    def __iter__(self):
        yield from map(self.sample, range(self.samples))


@pytest.mark.parametrize(("kind", "streams", "warns"), [(Whole, 4, 1), (Whole, 1, 0), (Numbers, 4, 0)])
def test_a_stream_that_does_not_ask_which_one_it_is_is_warned_of_from_its_first_batch_on(kind, streams, warns, caplog):
    warn_once.cache_clear()
    with loader_of(kind(), 0, streams=streams) as loader:
        iterator = iter(loader)
        next(iterator)
        assert len([text for text in caplog.messages if "get_worker_info" in text]) == warns
        assert not warns or 3 + sum(map(len, iterator)) == 4 * 60
    assert len([text for text in caplog.messages if "get_worker_info" in text]) == warns


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_datapipe_shares_out_what_it_has_shuffled_as_with_torchs_workers(num_workers, caplog):
    pipe = IterableWrapper(range(30)).shuffle().sharding_filter()
    with loader_of(pipe, num_workers) as loader:
        epochs = [rows(loader) for _ in range(2)]
        loader.set_epoch(0)
        iterator = iter(loader)
        begun = rows([next(iterator), next(iterator)])
        state = saved(loader)
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 2
    assert epochs[0] != epochs[1]
    with loader_of(pipe, num_workers) as loader:
        loader.load_state_dict(state)
        assert begun + rows(loader) == epochs[0]
    assert not caplog.messages


class KnowsTheWorkers(Numbers):
    """Asks for its number alone, and takes the number of workers from the program's settings."""

    def __iter__(self):
        return iter(range(get_worker_info().id, 30, 2))


@pytest.mark.parametrize("dataset", [KnowsTheWorkers(), IterableWrapper(range(30)).shuffle()])
def test_a_stream_that_cannot_know_its_share_is_warned_of(dataset, caplog):
    warn_once.cache_clear()
    with loader_of(dataset, 0) as loader:
        assert len(rows(loader)) > 30
    assert "samples come several times" in caplog.text


class Files(IterableDataset):
    files = range(32)

    def __iter__(self):
        return iter(self.files)


def split_for(workers, worker):
    """A program's worker_init_fn; workers: 0: asks how many there are."""
    workers = workers or get_worker_info().num_workers
    get_worker_info().dataset.files = range(32)[worker::workers]


@pytest.mark.parametrize(("workers", "warns"), [(16, True), (0, False)])
def test_a_worker_init_fn_that_cannot_know_the_number_of_streams_is_warned_of(workers, warns, caplog):
    warn_once.cache_clear()
    with loader_of(Files(), 0, streams=8, worker_init_fn=partial(split_for, workers)) as loader:
        assert (sorted(rows(loader)) == list(range(32))) is not warns
    assert ("or not at all" in caplog.text) is warns


class HoldsGenerator(Numbers):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def __iter__(self):
        self.draw(self.generator)
        return super().__iter__()

    def draw(self, generator):
        if isinstance(generator, torch.Generator):
            return torch.randperm(4, generator=generator)
        return generator.shuffle([1, 2, 3, 4])


@pytest.mark.parametrize(
    "make", [random.Random, np.random.default_rng, lambda seed: torch.Generator().manual_seed(seed)]
)
def test_a_stream_whose_generator_begins_anew_in_each_pass_is_warned_of(make, caplog):
    warn_once.cache_clear()
    with loader_of(HoldsGenerator(make(0)), 0) as loader:
        assert rows(loader)
    assert "HoldsGenerator.generator, which begins each pass as at first" in caplog.text


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
        state = saved(loader)
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
    short = {"drop_last": True, "batch_size": 5}
    for settings in ({}, {"steps_per_epoch": 4}, short, {"steps_per_epoch": 4} | short):
        dataset = Shards(4 if "drop_last" in settings else 0)
        with loader_of(dataset, workers, **settings) as loader, pytest.raises(StreamError, match="gave no batch"):
            list(loader)


class Shards(IterableDataset):
    """Gives each stream whole shards of four samples; there may be too few of them, or none."""

    def __init__(self, shards):
        self.shards = shards

    def __iter__(self):
        info = get_worker_info()
        for shard in range(info.id, self.shards, info.num_workers):
            yield from range(4 * shard, 4 * shard + 4)


class CleaningUp(Numbers):
    """Makes a file when its generator ends."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def __iter__(self):
        try:
            yield from super().__iter__()
        finally:
            self.file.touch()


def test_a_generator_that_is_left_early_runs_its_finally_when_the_loader_is_closed(num_workers, tmp_path):
    gc.disable()
    try:
        with WorkerLoader(CleaningUp(tmp_path / "file"), 4, num_workers=num_workers, seed=0) as loader:
            next(iter(loader))
        assert (tmp_path / "file").exists()
    finally:
        gc.enable()


class WithLambda(Numbers):
    def __init__(self):
        super().__init__()
        self.transform = lambda sample: sample


of_numbers = partial(WorkerLoader, Numbers(), 3)
REFUSED = {
    "shuffle=True: .* give shuffle_buffer=1000": partial(of_numbers, seed=0, shuffle=True),
    "streams=8 .* give a multiple of 3": partial(of_numbers, seed=0, streams=8, world_size=3),
    "'thread' needs a map-style dataset": partial(of_numbers, seed=0, worker_method="thread"),
    "needs? a seed": partial(of_numbers, shuffle_buffer=8),
    "is split by rank already": lambda: WorkerLoader(split_by_rank(), 3, seed=0, world_size=2),
    "WithLambda cannot be pickled, and each stream .*lambda": lambda: list(WorkerLoader(WithLambda(), 3, seed=0)),
    "cannot be read in a thread": lambda: list(Preloader(of_numbers(seed=0), "cpu", 2)),
    "has no length: give steps_per_epoch": lambda: len(of_numbers(seed=0)),
    "streams=2, but .* streams=4": lambda: load(loader_of(Numbers(), 0), loader_of(Numbers(), 0, streams=2)),
    "stream 1 ended 1 samples before": lambda: load(loader_of(Numbers(9), 0), loader_of(Numbers(), 0)),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_work_is_refused_in_words(said):
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError), match=said):
        REFUSED[said]()


def split_by_rank():
    dataset = Numbers()
    dataset._distributed = "rank 0 of 2"  # as Hugging Face's split_dataset_by_node notes it
    return dataset


def load(loader, other):
    """Gives the loader the other's state in mid-epoch, and reads on."""
    iterator = iter(other)
    for _ in range(5):
        next(iterator)
    loader.load_state_dict(other.state_dict())
    list(loader)
