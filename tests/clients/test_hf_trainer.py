"""Hugging Face's Trainer, whose get_train_dataloader returns a loader of ours."""

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

import torch
from points import BATCH_SIZE, SEED, Points, indices, seeded_epoch

from loaders import WorkerLoader

QUIET = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}


class Line(torch.nn.Module):
    """Notes which samples each batch had."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(indices({"x": x, "labels": labels}))
        return {"loss": (self.line(x).squeeze(1) - labels).square().mean()}


def train(folder, resume: str | None = None, **arguments) -> list[list[int]]:
    loader = WorkerLoader(Points(), BATCH_SIZE, True, num_workers=2, persistent_workers=True, seed=SEED)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return loader

    line, times = Line(), {"num_train_epochs": 3, "per_device_train_batch_size": BATCH_SIZE}
    settings = transformers.TrainingArguments(str(folder), **QUIET, **times, **arguments)
    with loader:
        Trainer(line, settings, train_dataset=loader.dataset).train(resume_from_checkpoint=resume)
    return line.seen


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations
def test_training_gets_the_order_of_each_epoch_and_after_a_resume_the_batches_that_were_left(tmp_path):
    # The Trainer leaves out the first ones by a stock DataLoader on our batch sampler.
    whole = [batch for epoch in range(3) for batch in seeded_epoch(epoch)]
    assert train(tmp_path, save_strategy="steps", save_steps=8) == whole
    rest = train(tmp_path, resume=str(tmp_path / "checkpoint-8"), save_strategy="no")
    assert rest == whole[8:]
