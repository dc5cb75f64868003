"""Hugging Face's Trainer, whose get_train_dataloader returns a loader of ours."""

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

import torch
from points import BATCH_SIZE, SEED, Points, indices, seeded_epoch

from loaders import WorkerLoader

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own deprecations


class Line(torch.nn.Module):
    """Notes which samples each batch had."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(indices({"x": x, "labels": labels}))
        found = self.line(x).squeeze(1)
        return {"loss": (found - labels).square().mean(), "logits": found}

    def epochs(self) -> list[list[list[int]]]:
        return [self.seen[start : start + 6] for start in range(0, len(self.seen), 6)]


def loader_of(seed: int | None, num_workers: int = 2, shuffle: bool = True) -> WorkerLoader:
    persistent = seed is not None and num_workers > 0
    return WorkerLoader(
        Points(), BATCH_SIZE, shuffle, num_workers=num_workers, persistent_workers=persistent, seed=seed
    )


def train(loader, folder, resume: str | None = None, **arguments) -> Line:
    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return loader

    arguments = {"num_train_epochs": 3, "save_strategy": "no", **arguments}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    line = Line()
    settings = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH_SIZE, learning_rate=1e-4, **quiet, **arguments
    )
    Trainer(line, settings, train_dataset=loader.dataset).train(resume_from_checkpoint=resume)
    return line


@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_a_seed_training_gets_the_order_of_each_epoch(num_workers, tmp_path):
    with loader_of(SEED, num_workers) as loader:
        line = train(loader, tmp_path)
    assert line.epochs() == [seeded_epoch(epoch) for epoch in range(3)]


def test_a_run_resumed_within_an_epoch_gets_the_batches_that_were_left(tmp_path):
    # The Trainer leaves out the first ones by a stock DataLoader on our batch sampler.
    with loader_of(SEED) as loader:
        train(loader, tmp_path, save_strategy="steps", save_steps=8)
    with loader_of(SEED) as loader:
        line = train(loader, tmp_path, resume=str(tmp_path / "checkpoint-8"))
    assert line.seen == [*seeded_epoch(1)[2:], *seeded_epoch(2)]


def test_evaluation_predicts_every_sample_in_order(tmp_path):
    class Trainer(transformers.Trainer):
        def get_test_dataloader(self, dataset):
            return loader

    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True)
    line = Line()
    with loader_of(SEED, shuffle=False) as loader:
        found = Trainer(line, arguments).predict(loader.dataset)
    inputs = torch.stack([Points()[index]["x"] for index in range(len(Points()))])
    torch.testing.assert_close(torch.from_numpy(found.predictions), line.line(inputs).squeeze(1).detach())
