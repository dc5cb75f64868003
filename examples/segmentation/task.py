"""Segmentation: a class for each pixel. The mean IoU is a metric of a whole epoch; predict.py writes masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from data.errors import DataError
from training.tasks import Task


class Segmentation(Task):
    """Outputs are logits (B, classes, H, W), labels int64 (B, H, W). Score: pixels, the share of right pixels."""

    metric = "miou"
    higher_is_better = True
    columns = ("mask",)  # of predictions.csv

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.num_outputs = len(dataset.classes)

    def check(self, outputs: Any, labels: Tensor) -> None:
        wanted = (len(labels), self.num_outputs, *labels.shape[1:])
        if tuple(outputs.shape) != wanted:
            raise DataError(f"the network returned outputs of shape {tuple(outputs.shape)}, and labels need {wanted}")

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels)

    def _scores(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"pixels": outputs.argmax(1) == labels}

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(1)

    def write_prediction(self, prediction: Tensor, name: str, folder: Path) -> list[str]:
        """Writes a mask (H, W), whose values are the classes, as a PNG. Returns the cells of `columns`."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{Path(name).stem}.png"
        Image.fromarray(prediction.to("cpu", torch.uint8).numpy()).save(file)
        return [str(file)]


class MeanIoU:
    """Intersection over union, the mean over the classes that occur. torchmetrics.JaccardIndex is a larger choice."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        self.counts = torch.zeros(self.num_classes, self.num_classes)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        pairs = (labels * self.num_classes + outputs.argmax(1)).flatten().cpu()
        self.counts += torch.bincount(pairs, minlength=self.num_classes**2).view_as(self.counts)

    def compute(self) -> float:
        right = self.counts.diagonal()
        union = self.counts.sum(0) + self.counts.sum(1) - right
        return float((right / union)[union > 0].mean())
