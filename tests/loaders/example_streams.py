"""Iterable datasets with random numbers, states, errors and buffers, and what a consumer sees of them."""

import random

import numpy as np
import torch
from example_datasets import outcomes
from torch.utils.data import IterableDataset, get_worker_info

from loaders import WorkerLoader


class Numbers(IterableDataset):
    """Streams of uneven length. A sample is its number, and three random ones."""

    def __init__(self, samples=60):
        self.samples = samples

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.samples - first, step):
            yield self.sample(number)

    def sample(self, number):
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

    def set_epoch(self, epoch):
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

    def sample(self, number):
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


def seen(batches):
    """What a consumer gets, errors in their places."""
    return [outcome.split()[-1] if isinstance(outcome, str) else outcome for outcome in outcomes(batches)]


def loader_of(dataset, workers, **settings):
    usual = {"batch_size": 3, "seed": 5, "streams": 4, "num_workers": workers, "persistent_workers": workers > 0}
    return WorkerLoader(dataset, **usual | settings)


def numbers(batches):
    return [batch[:, 0].tolist() for batch in batches]
