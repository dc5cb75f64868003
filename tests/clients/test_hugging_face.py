"""Accelerate's prepare(), which builds a DataLoader on our dataset, batch sampler and collate_fn, and the Trainer."""

import pytest

accelerate = pytest.importorskip("accelerate")

import torch
from accelerate.data_loader import prepare_data_loader
from points import BATCH_SIZE, KINDS, SEED, Points, check_epochs, indices, seeded, seeded_epoch

from loaders import WorkerLoader


class Line(torch.nn.Module):
    """Notes which samples each batch had."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.seen = []

    def forward(self, x, labels):
        self.seen.append(indices({"x": x, "labels": labels}))
        return {"loss": (self.line(x).squeeze(1) - labels).square().mean()}


@pytest.mark.parametrize("kind", KINDS)
def test_training_gets_every_sample_once_an_epoch_in_the_order_of_the_epoch(kind):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    line = Line()
    epochs = []
    steps = 0
    with KINDS[kind]() as loader:
        model, optimizer, prepared = accelerator.prepare(line, torch.optim.SGD(line.parameters(), lr=1e-4), loader)
        for _ in range(3):
            for batch in prepared:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
                steps += accelerator.sync_gradients
            epochs.append(line.seen[-6:])
    check_epochs(epochs)
    assert kind == "unseeded" or epochs == [seeded_epoch(epoch) for epoch in range(3)]
    # After the fourth and the last of six batches: it knows which is the last one of a loader that it has prepared.
    assert steps == (3 * 6 // 4 if kind == "preloader" else 3 * 2)


@pytest.mark.parametrize("seed", [None, SEED])
def test_two_processes_share_every_epoch_and_no_two_epochs_have_the_same_order(seed):
    # Accelerate seeds the unseeded sampler from torch's generator, which is in the same state on every process.
    ranks = []
    for rank in range(2):
        torch.manual_seed(1)
        loader = WorkerLoader(Points(24), BATCH_SIZE, shuffle=True, seed=seed)
        ranks.append(prepare_data_loader(loader, num_processes=2, process_index=rank))
    epochs = list(zip(*([[*map(indices, rank)] for _ in range(3)] for rank in ranks), strict=True))
    check_epochs([first + second for first, second in epochs], 24)
    if seed is not None:
        wholes = [seeded_epoch(epoch, 24) for epoch in range(3)]
        assert [list(shares) for shares in epochs] == [[whole[0::2], whole[1::2]] for whole in wholes]


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations
def test_the_trainer_gets_the_order_of_each_epoch_and_after_a_resume_the_batches_that_were_left(tmp_path):
    # It leaves out the first ones by a stock DataLoader on our batch sampler.
    transformers = pytest.importorskip("transformers")
    loader = seeded()

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return loader

    def train(resume=None):
        line = Line()
        quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
        times = {"per_device_train_batch_size": BATCH_SIZE, "save_strategy": "steps", "save_steps": 8}
        settings = transformers.TrainingArguments(str(tmp_path), **quiet, **times)
        Trainer(line, settings, train_dataset=loader.dataset).train(resume_from_checkpoint=resume)
        return line.seen

    whole = [batch for epoch in range(3) for batch in seeded_epoch(epoch)]
    with loader:
        assert train() == whole
        loader.set_epoch(0)
        assert train(str(tmp_path / "checkpoint-8")) == whole[8:]
