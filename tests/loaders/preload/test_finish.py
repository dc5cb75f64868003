"""Preloader(finish=...): a function that draws from the global generators runs in the consumer's thread, seeded."""

import random
import threading

import numpy as np
import pytest
import torch
from example_datasets import contents

from loaders import LoaderConfigError, Preloader, ResidentLoader, WorkerLoader

DATASET = torch.utils.data.TensorDataset(torch.arange(48.0))


def noisy(batch, key):
    (rows,) = batch
    numbers = [torch.rand(()).item(), random.random(), float(np.random.rand()), float(key.uniform(1)[0])]
    return torch.cat([rows, torch.tensor(numbers)])


def preloader(depth, finish=noisy, **options):
    loader = WorkerLoader(DATASET, 8, num_workers=options.pop("workers", 0), seed=2, **options)
    return Preloader(loader, "cpu", depth=depth, finish=finish)


def test_its_numbers_are_a_function_of_the_batch_at_any_depth_and_after_a_resume():
    with preloader(0) as loader:
        expected = [list(loader), list(loader)]
    assert len(torch.stack(expected[0] + expected[1])[:, -4:].unique()) == 4 * 12
    for depth, workers in ((1, 1), (3, 2)):
        with preloader(depth, workers=workers) as loader:
            for epoch in expected:
                for batch in epoch:
                    torch.rand(3)  # as a training step draws
                    assert torch.equal(next(loader), batch)
                assert next(loader, None) is None
    with preloader(2, workers=1) as loader:
        next(loader), next(loader)
        state = loader.state_dict()
    with preloader(0) as loader:
        loader.load_state_dict(state)
        assert contents(loader) == contents(expected[0][2:])
    with preloader(0, rank=1, world_size=2, shuffle=False) as loader:
        assert not torch.equal(next(loader)[-4:], expected[0][0][-4:]), "ranks draw other numbers"


def test_the_consumer_draws_as_without_it_and_it_runs_in_its_thread(depth):
    threads = set()

    def finish(batch, key):
        threads.add(threading.current_thread())
        return noisy(batch, key)

    def drawn(finish):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        with preloader(depth, finish, workers=1) as loader:
            return [(torch.rand(()).item(), random.random(), np.random.rand()) for _ in loader]

    assert drawn(finish) == drawn(None)
    assert threads == {threading.current_thread()}


def test_its_error_comes_in_the_place_of_its_batch_and_an_interrupted_call_is_repeated(depth):
    fails = [ValueError("no"), KeyboardInterrupt()]

    def finish(batch, key):
        made = noisy(batch, key)
        if made[0] == 16 and fails:
            raise fails.pop()
        return made

    with preloader(0) as loader:
        expected = list(loader)
    with preloader(depth, finish, workers=1) as loader:
        iterator = iter(loader)
        got = [next(iterator), next(iterator)]
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        with pytest.raises(ValueError, match="no"):
            next(iterator)
        got += iterator
    assert contents(got) == contents(expected[:2] + expected[3:])


def test_stop_iteration_from_it_ends_no_epoch(depth):
    def drained(batch, key):
        return next(iter(()))

    with Preloader(WorkerLoader(DATASET, 24, seed=2), "cpu", depth, finish=drained) as loader:
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="StopIteration"):
                next(iterator)
        assert next(iterator, None) is None


class PassesOn(torch.nn.Module):
    def forward(self, *inputs):  # as torchvision's v2 has it
        return inputs


def make(argument, function, depth=0):
    if argument == "augment":
        return ResidentLoader(DATASET, 8, augment=function)
    return Preloader(WorkerLoader(DATASET, 8), "cpu", depth, **{argument: function})


@pytest.mark.parametrize("argument", ["transform", "finish", "augment"])
@pytest.mark.parametrize("function", [lambda batch: batch, torch.nn.Sequential(torch.nn.Identity())])
def test_a_function_of_the_batch_alone_is_refused_with_the_remedy(argument, function):
    with pytest.raises(LoaderConfigError, match=rf"{argument} is called with a batch .*finish=lambda batch"):
        make(argument, function)


@pytest.mark.parametrize("argument", ["transform", "finish", "augment"])
def test_a_function_that_returns_random_beside_the_batch_is_refused_with_the_remedy(argument):
    with pytest.raises(LoaderConfigError, match=rf"{argument} has returned its second.*finish=lambda batch, random"):
        next(iter(make(argument, PassesOn())))
    (batch,) = next(iter(make("finish", lambda batch, random: PassesOn()(*batch))))
    assert torch.equal(batch, torch.arange(8.0))
