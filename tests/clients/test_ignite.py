"""Ignite's Engine, and its DeterministicEngine, which makes a loader anew from its public attributes."""

import pytest

pytest.importorskip("ignite")

import torch
from ignite.engine import DeterministicEngine, Engine, Events
from points import BATCH_SIZE, SEED, Points, check_epochs, indices, seeded_epoch

from loaders import WorkerLoader


def seeded(**settings) -> WorkerLoader:
    settings = {"num_workers": 2, "persistent_workers": True, "seed": SEED, **settings}
    return WorkerLoader(Points(), BATCH_SIZE, shuffle=True, **settings)


def run(loader, engine=Engine, **settings) -> list[list[list[int]]]:
    """Which samples each batch of each epoch had."""
    epochs: list[list[list[int]]] = []
    runner = engine(lambda _, batch: epochs[-1].append(indices(batch)))
    runner.add_event_handler(Events.EPOCH_STARTED, lambda _: epochs.append([]))
    runner.run(loader, **{"max_epochs": 3, **settings})
    return epochs


def test_an_engines_own_epoch_length_cuts_the_loaders_epochs_into_pieces():
    batches = [batch for epoch in range(3) for batch in seeded_epoch(epoch)]
    with seeded() as loader:
        assert run(loader, epoch_length=4) == [batches[:4], batches[4:8], batches[8:12]]


@pytest.mark.filterwarnings("ignore")  # what it says of torch's determinism
@pytest.mark.parametrize("settings", [{}, {"num_workers": 0}, {"seed": None}, {"worker_method": "thread"}], ids=str)
def test_a_deterministic_engine_gets_every_sample_once_an_epoch_and_the_same_again(settings):
    def epochs() -> list[list[list[int]]]:
        torch.manual_seed(4)
        with seeded(**{**settings, "persistent_workers": settings.get("num_workers") != 0}) as loader:
            return run(loader, DeterministicEngine)

    once = epochs()
    check_epochs(once)
    assert epochs() == once
