"""Datasets, networks, tasks and trainers of the finished runs in these tests."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from data.synthetic import Synthetic
from training.trainer import Trainer


class Table:
    """Rows of two tables of numbers, and a number to predict."""

    def __init__(self, train: bool, length: int = 64, **_: Any) -> None:
        self.left, self.right = np.random.default_rng(train).normal(size=(2, length, 3)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, index: int) -> dict[str, Any]:
        left, right = self.left[index], self.right[index]
        return {"left": left, "right": right, "y": left.sum() - right.sum()}


class MLP(nn.Module):
    def __init__(self, unlike: bool = False, **_: Any) -> None:
        super().__init__()
        self.layers, self.unlike = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), unlike

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """`unlike`: the exported program computes something else."""
        return self.layers(torch.cat([left, right], 1)) + (self.unlike and torch.compiler.is_exporting())


class Sizes(Synthetic):
    """Images of several widths; number 3 cannot be read."""

    read_batch = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 3:
            raise OSError("damaged")
        sample = super().__getitem__(index)
        return {"image": sample["image"][:, : 4 + index % 3].contiguous(), "label": int(sample["label"])}


def cropped(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch for training: all images as wide as the narrowest one, and labels from 0 on."""
    width = min(sample["image"].shape[1] for sample in samples)
    return default_collate([{**sample, "image": sample["image"][:, :width]} for sample in samples])


class Noise(Trainer):
    """Its score depends on a module beside the network, on dropout there, and on random numbers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.model.parameters(), *self.head.parameters()], 0.1)

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        return self.task.loss(self.head(self.model(batch["image"])), batch["label"])

    def evaluation_step(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"noise": self.head(self.model(batch["image"])).mean(1) + torch.randn(len(batch["label"]))}
