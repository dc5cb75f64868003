"""Distillation (Hinton et al., arXiv:1503.02531): a small network learns the outputs of a larger, frozen one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.small_cnn import SmallCNN
from training.checkpoint import load_weights, read_checkpoint
from training.trainer import Trainer


class Distillation(Trainer):
    """teacher: a checkpoint of model=small_cnn; None: random weights, for a try. width: its model.width.

    The teacher is no part of self.model: it is not trained. Checkpoints have its weights, too.
    """

    def __init__(self, *arguments: Any, teacher: str | None = None, width: int = 16, share: float = 0.5) -> None:
        super().__init__(*arguments)
        self.teacher, self.share = SmallCNN(width=width, **options(self.spec.model_options)), share
        if teacher is not None:
            load_weights(self.teacher, read_checkpoint(Path(teacher))["model"], Path(teacher))
        self.teacher.to(self.device).eval().requires_grad_(False)

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        inputs, labels = self.inputs_and_labels(batch)
        outputs = self.model(*inputs)
        with torch.no_grad():
            taught = self.teacher(*inputs).float().softmax(1)
        distance = functional.cross_entropy(outputs.float(), taught)
        self.log(distance=distance)
        return self.share * distance + (1 - self.share) * self.task.loss(outputs, labels)


def options(given: dict[str, int]) -> dict[str, int]:
    return {key: given[key] for key in ("num_classes", "in_channels")}
