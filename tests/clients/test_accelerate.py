"""Accelerate's prepare(), which builds a DataLoader of its own on our dataset, batch sampler and collate_fn."""

import pytest

accelerate = pytest.importorskip("accelerate")

import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from points import BATCH_SIZE, LENGTH, SEED, Points, check_epochs, indices, seeded_epoch

from loaders import Preloader, WorkerLoader

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def seeded(num_workers: int = 0, **settings) -> WorkerLoader:
    settings = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": SEED, **settings}
    return WorkerLoader(Points(), num_workers=num_workers, **settings)


def epoch_of(loader) -> list[list[int]]:
    return [indices(batch) for batch in loader]


def prepare(*objects):
    return accelerate.Accelerator(cpu=True).prepare(*objects)


@WORKERS
def test_every_epoch_of_a_prepared_seeded_loader_has_the_order_of_that_epoch(num_workers):
    prepared = prepare(seeded(num_workers))
    assert [epoch_of(prepared) for _ in range(3)] == [seeded_epoch(epoch) for epoch in range(3)]


@WORKERS
def test_every_epoch_of_a_prepared_unseeded_loader_has_another_order(num_workers):
    prepared = prepare(WorkerLoader(Points(), BATCH_SIZE, shuffle=True, num_workers=num_workers))
    check_epochs([epoch_of(prepared) for _ in range(3)])


def test_the_epoch_that_set_epoch_names_is_the_one_that_comes():
    prepared = prepare(seeded())
    for epoch in (4, 2, 2, 0):
        prepared.set_epoch(epoch)
        assert epoch_of(prepared) == seeded_epoch(epoch)


@pytest.mark.parametrize("seed", [None, SEED])
def test_two_processes_share_every_epoch_and_no_two_epochs_have_the_same_order(seed):
    # Accelerate seeds the unseeded sampler from torch's generator, which is in the same state on every process.
    ranks = []
    for rank in range(2):
        torch.manual_seed(1)
        loader = WorkerLoader(Points(24), BATCH_SIZE, shuffle=True, seed=seed)
        ranks.append(prepare_data_loader(loader, num_processes=2, process_index=rank))
    epochs = list(zip(*([epoch_of(rank) for _ in range(3)] for rank in ranks), strict=True))
    check_epochs([first + second for first, second in epochs], 24)
    if seed is not None:
        for epoch, shares in enumerate(epochs):
            whole = seeded_epoch(epoch, 24)
            assert list(shares) == [whole[0::2], whole[1::2]]


def test_the_rest_of_an_epoch_comes_after_its_first_batches_were_skipped():
    prepared = prepare(seeded())
    rest = skip_first_batches(prepared, 2)
    rest.set_epoch(1)
    assert epoch_of(rest) == seeded_epoch(1)[2:]


def test_a_batch_size_that_leaves_nothing_over_and_no_shuffling_come_as_from_a_stock_loader():
    prepared = prepare(seeded(shuffle=False, drop_last=True))
    whole = [[*range(start, start + BATCH_SIZE)] for start in range(0, LENGTH - BATCH_SIZE + 1, BATCH_SIZE)]
    assert [epoch_of(prepared) for _ in range(2)] == [whole, whole]


def test_a_preloader_is_left_as_it_is():
    with Preloader(seeded(2, persistent_workers=True), "cpu") as loader:
        _, prepared = prepare(torch.nn.Linear(2, 1), loader)
        assert prepared is loader
        assert [epoch_of(prepared) for _ in range(2)] == [seeded_epoch(epoch) for epoch in range(2)]


def test_a_training_loop_with_gradient_accumulation_sees_every_sample_once_an_epoch():
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    line = torch.nn.Linear(2, 1)
    line, optimizer, prepared = accelerator.prepare(line, torch.optim.SGD(line.parameters(), lr=1e-4), seeded(2))
    epochs, steps = [], 0
    for _ in range(2):
        epochs.append([])
        for batch in prepared:
            with accelerator.accumulate(line):
                loss = (line(batch["x"]).squeeze(1) - batch["labels"]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            epochs[-1].append(indices(batch))
            steps += accelerator.sync_gradients
    check_epochs(epochs)
    assert steps == 4  # after the fourth and the last of six batches: it knows which is the last
