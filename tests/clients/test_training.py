"""Every client trains for three epochs, on every kind of our loaders: it gets each sample once an epoch, in order."""

from typing import Any

import pytest
import torch
from points import BATCH_SIZE, SEED, Points, check_epochs, indices, seeded_epoch

from loaders import Preloader, WorkerLoader

EPOCHS = 3
Epochs = list[list[list[int]]]  # which samples each batch of each epoch had
pytestmark = pytest.mark.filterwarnings("ignore")  # the clients' own advice and deprecations


def accelerate(loader: Any) -> Epochs:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=4)
    line = torch.nn.Linear(2, 1)
    line, optimizer, prepared = accelerator.prepare(line, torch.optim.SGD(line.parameters(), lr=1e-4), loader)
    epochs, steps = [], 0
    for _ in range(EPOCHS):
        epochs.append([])
        for batch in prepared:
            with accelerator.accumulate(line):
                accelerator.backward((line(batch["x"]).squeeze(1) - batch["labels"]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            epochs[-1].append(indices(batch))
            steps += accelerator.sync_gradients
    # After the fourth and the last of six batches: it knows which is the last one of a loader that it has prepared.
    assert steps == (EPOCHS * 6 // 4 if isinstance(loader, Preloader) else EPOCHS * 2)
    return epochs


def ignite(loader: Any, name: str = "Engine", **settings: Any) -> Epochs:
    engines = pytest.importorskip("ignite.engine")
    epochs: Epochs = []
    engine = getattr(engines, name)(lambda _, batch: epochs[-1].append(indices(batch)))
    engine.add_event_handler(engines.Events.EPOCH_STARTED, lambda _: epochs.append([]))
    engine.run(loader, max_epochs=EPOCHS, **settings)
    return epochs


def lightning(loader: Any) -> Epochs:
    pytest.importorskip("lightning")
    from lightning_points import Recorder, trainer

    module = Recorder()
    trainer(max_epochs=EPOCHS).fit(module, loader)
    return list(module.trained.values())


CLIENTS = [accelerate, ignite, lightning]
WORKERS = {"num_workers": 2, "persistent_workers": True}
KINDS = {  # the seed, the loader's settings, and the depth of a Preloader over it
    "seeded": (SEED, WORKERS, None),
    "preloader": (SEED, WORKERS, 2),
    "unseeded_new_workers": (None, {"num_workers": 2}, None),
}


@pytest.mark.parametrize(("seed", "settings", "depth"), KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_training_gets_every_sample_once_an_epoch_in_the_order_of_the_epoch(client, seed, settings, depth):
    loader = WorkerLoader(Points(), BATCH_SIZE, shuffle=True, seed=seed, **settings)
    with loader if depth is None else Preloader(loader, "cpu", depth) as loader:
        epochs = client(loader)
    assert len(epochs) == EPOCHS
    check_epochs(epochs)
    if seed is not None:
        # To see whether what is no DataLoader can be iterated over, Lightning begins an epoch of it: ours is 0.
        first = int(client is lightning and depth is not None)
        assert epochs == [seeded_epoch(epoch) for epoch in range(first, first + EPOCHS)]


def test_ignites_own_epoch_length_cuts_the_loaders_epochs_into_pieces():
    batches = [batch for epoch in range(3) for batch in seeded_epoch(epoch)]
    with WorkerLoader(Points(), BATCH_SIZE, shuffle=True, seed=SEED) as loader:
        assert ignite(loader, epoch_length=4) == [batches[:4], batches[4:8], batches[8:12]]


@pytest.mark.parametrize("seed", [None, SEED])
def test_ignites_deterministic_engine_gets_every_sample_once_an_epoch_and_the_same_again(seed):
    # It makes a loader anew from the public attributes of ours.
    runs = []
    for _ in range(2):
        torch.manual_seed(4)
        with WorkerLoader(Points(), BATCH_SIZE, shuffle=True, num_workers=2, seed=seed) as loader:
            runs.append(ignite(loader, "DeterministicEngine"))
    check_epochs(runs[0])
    assert runs[0] == runs[1]
