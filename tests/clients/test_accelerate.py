"""Accelerate's prepare(), which builds a DataLoader of its own on our dataset, batch sampler and collate_fn."""

import pytest

accelerate = pytest.importorskip("accelerate")

import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from points import BATCH_SIZE, SEED, Points, check_epochs, epoch_of, seeded_epoch

from loaders import WorkerLoader


def test_the_epoch_that_set_epoch_names_comes_or_what_is_left_of_it():
    loader = WorkerLoader(Points(), BATCH_SIZE, shuffle=True, seed=SEED)
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    for epoch in (4, 2, 2, 0):
        prepared.set_epoch(epoch)
        assert epoch_of(prepared) == seeded_epoch(epoch)
    rest = skip_first_batches(prepared, 2)
    rest.set_epoch(1)
    assert epoch_of(rest) == seeded_epoch(1)[2:]


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
