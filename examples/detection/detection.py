"""Detection of coloured squares, with a box for each cell of a grid, as in YOLO (Redmon et al., arXiv:1506.02640)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, smooth_l1_loss

from models.small_cnn import convolution
from training.tasks import Task

STRIDE, SIDE = 8, 16.0  # pixels: of a cell, and of a box for which the network returns 0

Boxes = dict[str, Tensor]  # "boxes", float (N, 4): left, top, right, bottom; "labels", int64 (N,); predicted: "scores"


class Squares:
    """Samples (image, boxes): uint8 (64, 64, 3) with a square in one to four of its quarters."""

    classes = ("red", "blue")
    mean, std = (0.4, 0.4, 0.4), (0.25, 0.25, 0.25)

    def __init__(self, train: bool, length: int = 1024) -> None:
        self.train, self.length = train, length if train else max(16, length // 8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Boxes]:
        random = np.random.default_rng([index, self.train])
        image = random.integers(70, 120, (64, 64, 3), np.uint8)
        boxes, labels = [], []
        for quarter in random.permutation(4)[: random.integers(1, 5)]:
            side, label = int(random.integers(10, 28)), int(random.integers(2))
            left, top = random.integers(0, 32 - side, 2) + 32 * np.array([quarter % 2, quarter // 2])
            image[top : top + side, left : left + side] = ((220, 60, 50), (50, 80, 230))[label]
            boxes.append([left, top, left + side, top + side])
            labels.append(label)
        return torch.from_numpy(image), {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}


def collate(samples: list[tuple[Tensor, Boxes]]) -> dict[str, Any]:
    """Stacks the images; the boxes stay a list, as their number differs."""
    images, boxes = zip(*samples, strict=True)
    return {"image": torch.stack(images), "label": list(boxes)}


class Detector(nn.Sequential):
    """Takes images (B, in_channels, H, W), returns (B, 5 + num_classes, H / 8, W / 8): the numbers of each cell.

    They are a logit of whether the centre of a box is in the cell, its place there (0 to 1), the logarithms of the
    box's width and height over SIDE, and a logit for each class.
    """

    def __init__(self, num_classes: int, in_channels: int, width: int = 24) -> None:
        layers: list[nn.Module] = []
        for channels, out in ((in_channels, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [convolution(channels, out), nn.MaxPool2d(2)]
        super().__init__(*layers, convolution(4 * width, 4 * width), nn.Conv2d(4 * width, 5 + num_classes, 1))


class Detection(Task):
    """Score: found, the share of the cells with a box whose probability is above `threshold`."""

    def __init__(self, dataset: Any, threshold: float = 0.5, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.num_outputs, self.threshold = len(dataset.classes), threshold

    def loss(self, outputs: Tensor, labels: list[Boxes]) -> Tensor:
        cells, target, classes = targets(outputs, labels)
        predicted = outputs.float().permute(0, 2, 3, 1)[cells]  # (boxes, 5 + classes)
        rare = outputs.new_tensor(5.0)  # most cells have no box
        there = binary_cross_entropy_with_logits(outputs[:, 0].float(), cells.float(), pos_weight=rare)
        return there + smooth_l1_loss(predicted[:, 1:5], target) + cross_entropy(predicted[:, 5:], classes)

    def scores(self, outputs: Tensor, labels: list[Boxes]) -> dict[str, Tensor]:
        cells, _, _ = targets(outputs, labels)
        found = (outputs[:, 0].sigmoid() > self.threshold) & cells
        return {"found": found.flatten(1).sum(1) / cells.flatten(1).sum(1)}

    def predictions(self, outputs: Tensor) -> list[Boxes]:
        """The boxes of each image, which predict.py writes."""
        return boxes_of(outputs.float(), self.threshold)


def targets(outputs: Tensor, labels: list[Boxes]) -> tuple[Tensor, Tensor, Tensor]:
    """Which cells have a box, (B, rows, columns); their four numbers (boxes, 4) and their classes (boxes,)."""
    cells = torch.zeros(len(outputs), *outputs.shape[2:], dtype=torch.bool, device=outputs.device)
    target, classes = cells.new_zeros(*cells.shape, 4, dtype=torch.float32), torch.zeros_like(cells, dtype=torch.long)
    for image, label in enumerate(labels):
        left, top, right, bottom = label["boxes"].unbind(1)
        x, y = (left + right) / 2 / STRIDE, (top + bottom) / 2 / STRIDE
        where = image, y.long(), x.long()
        cells[where], classes[where] = True, label["labels"]
        target[where] = torch.stack([x % 1, y % 1, ((right - left) / SIDE).log(), ((bottom - top) / SIDE).log()], 1)
    return cells, target[cells], classes[cells]


def boxes_of(outputs: Tensor, threshold: float) -> list[Boxes]:
    """The boxes whose probability is above `threshold`, of each image."""
    found = []
    for image in outputs.permute(0, 2, 3, 1):
        there = image[..., 0].sigmoid()
        rows, columns = (there > threshold).nonzero(as_tuple=True)
        cell = image[rows, columns]
        x, y = (columns + cell[:, 1]) * STRIDE, (rows + cell[:, 2]) * STRIDE
        wide, high = (SIDE / 2 * cell[:, 3:5].exp()).unbind(1)
        boxes = torch.stack([x - wide, y - high, x + wide, y + high], 1)
        found.append({"boxes": boxes, "scores": there[rows, columns], "labels": cell[:, 5:].argmax(1)})
    return found


class MeanAveragePrecision:
    """torchmetrics' scores map_map, map_map_50, ... of all test images. Without the packages it has none."""

    def __init__(self) -> None:
        self.metric: Any = None
        if find_spec("torchmetrics") and find_spec("pycocotools"):
            from torchmetrics.detection import MeanAveragePrecision as Metric  # optional

            self.metric = Metric()

    def update(self, outputs: Tensor, labels: list[Boxes]) -> None:
        if self.metric is not None:
            self.metric.update(boxes_of(outputs, 0.05), labels)

    def compute(self) -> dict[str, Any]:
        return {} if self.metric is None else self.metric.compute()

    def reset(self) -> None:
        if self.metric is not None:
            self.metric.reset()
