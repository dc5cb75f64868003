"""Ignite's DeterministicEngine, which makes a loader anew from its public attributes, and its epoch length."""

import pytest

pytest.importorskip("ignite")

import torch
from ignite.engine import DeterministicEngine, Engine, Events
from points import BATCH_SIZE, SEED, Points, check_epochs, indices, seeded_epoch

from loaders import WorkerLoader


def run(engine, seed: int | None, **settings) -> list[list[list[int]]]:
    """Which samples each batch of each epoch had."""
    epochs: list[list[list[int]]] = []
    runner = engine(lambda _, batch: epochs[-1].append(indices(batch)))
    runner.add_event_handler(Events.EPOCH_STARTED, lambda _: epochs.append([]))
    torch.manual_seed(4)
    with WorkerLoader(Points(), BATCH_SIZE, shuffle=True, num_workers=2, seed=seed) as loader:
        runner.run(loader, max_epochs=3, **settings)
    return epochs


def test_an_engines_own_epoch_length_cuts_the_loaders_epochs_into_pieces():
    batches = [batch for epoch in range(3) for batch in seeded_epoch(epoch)]
    assert run(Engine, SEED, epoch_length=4) == [batches[:4], batches[4:8], batches[8:12]]


@pytest.mark.filterwarnings("ignore")  # what it says of torch's determinism
@pytest.mark.parametrize("seed", [None, SEED])
def test_a_deterministic_engine_gets_every_sample_once_an_epoch_and_the_same_again(seed):
    once = run(DeterministicEngine, seed)
    check_epochs(once)
    assert run(DeterministicEngine, seed) == once
