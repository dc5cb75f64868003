"""What the tests of Lightning train, in their own process and in a script."""

from typing import Any

import lightning
import torch
from points import indices


class Recorder(lightning.LightningModule):
    """Trains a line on Points and notes which samples each epoch's batches had."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.trained: dict[int, list[list[int]]] = {}
        self.validated: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        self.trained.setdefault(self.current_epoch, []).append(indices(batch))
        return (self.line(batch["x"]).squeeze(1) - batch["labels"]).square().mean()

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        self.validated += indices(batch)

    def predict_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        return batch["x"][:, 0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def trainer(**settings: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**{"max_epochs": 3, "devices": 1, "enable_checkpointing": False, **quiet, **settings})
