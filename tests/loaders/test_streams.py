"""Iterable datasets: logical streams with a seed, whatever reads them, and torch's own behaviour without one."""

import json
import logging
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from loaders import Preloader, WorkerLoader, merge_states
from loaders.workers import stream_dispatcher

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
    """Its iterator is an object with a state, which it shuffles by numbers of its own; reading it again is an error."""

    reads: dict[int, int]

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
    settings = {"batch_size": 3, "seed": 5, "streams": 4, **settings}
    return (
        WorkerLoader(dataset, num_workers=workers, persistent_workers=workers > 0, prefetch_factor=2, **settings)
        if (workers)
        else WorkerLoader(dataset, **settings)
    )


VARIANTS = [
    (kind, settings)
    for kind in (Numbers, Stateful, Failing, Refilled)
    for settings in ({}, {"shuffle_buffer": 5}, {"steps_per_epoch": 9}, {"steps_per_epoch": 9, "shuffle_buffer": 5})
]


@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_kills_resumes_and_other_numbers_of_workers_change_no_byte(kind, settings):
    with loader_of(kind(), 0, **settings) as loader:
        epochs = [seen(loader) for _ in range(3)]
    assert len(set(map(str, epochs))) == 3, "each has its own random numbers"
    draw = random.Random(str((kind.__name__, settings)))
    for workers in (1, 3, 0, 2):
        state, epoch, got = None, 0, []
        while epoch < 3:
            with loader_of(kind(), workers, **settings) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                iterator, count = iter(loader), draw.randrange(1, 14)
                for _ in range(count):
                    if workers and draw.random() < 0.2:
                        os.kill(draw.choice(iterator._workers).pid, signal.SIGKILL)
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
            workers = draw.choice((0, 1, 2, 3))
