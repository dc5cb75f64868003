"""Loaders over a sampler of any kind, and draws from the global generators, from which samplers draw too."""

import random

import numpy as np
import pytest
import torch
from every_loader import LOADERS
from example_datasets import Numbers
from torch.utils.data import BatchSampler

LENGTH = 24
BATCH_SIZE = 4
KINDS = ("inline", "processes", "torch", "resident", "preloader")
AS_BATCHES = pytest.mark.parametrize("as_batches", [False, True])


def every(*names, but=""):
    return pytest.mark.parametrize("kind", [name for name in names or KINDS if name != but])


def over(kind, sampler, as_batches=False, batch_size=BATCH_SIZE, **settings):
    """A loader over a sampler, or over a batch sampler of it."""
    if as_batches:
        return LOADERS[kind].make(Numbers(LENGTH), 1, batch_sampler=BatchSampler(sampler, 4, False), seed=0)
    return LOADERS[kind].make(Numbers(LENGTH), batch_size, sampler=sampler, seed=0, **settings)


class Made(Numbers):
    """A sampler that gives what a function makes for each epoch, and counts epochs; its length may be wrong."""

    def __init__(self, make):
        super().__init__(LENGTH)
        self.make = make
        self.count = 0

    def __iter__(self):
        self.count += 1
        return iter(self.make())


def seed_globals(seed):
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)


def draw_globals():
    return [torch.rand(()).item(), np.random.random(), random.random()]
