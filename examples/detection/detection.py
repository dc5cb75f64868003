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

STRIDE = 8  # pixels: the side of a cell
SIDE = 16.0  # pixels: the side of a box for which the network returns 0
COLOURS = ((220, 60, 50), (50, 80, 230))  # red and blue
THRESHOLD = 0.05  # boxes of a higher probability count in the mean average precision

Boxes = dict[str, Tensor]  # "boxes", float (N, 4): left, top, right, bottom; "labels", int64 (N,); predicted: "scores"


class Squares:
    """Samples (image, boxes): uint8 (64, 64, 3) with a square in one to four of its quarters."""

    classes = ("red", "blue")
    mean = (0.4, 0.4, 0.4)
    std = (0.25, 0.25, 0.25)

    def __init__(self, train: bool, length: int = 1024) -> None:
        self.train = train
        self.length = length if train else max(16, length // 8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Boxes]:
        random = np.random.default_rng([index, self.train])
        image = random.integers(70, 120, (64, 64, 3), np.uint8)
        boxes = []
        labels = []
        for quarter in random.permutation(4)[: random.integers(1, 5)]:
            side = int(random.integers(10, 28))
            label = int(random.integers(2))
            corner = 32 * np.array([quarter % 2, quarter // 2])
            left, top = corner + random.integers(0, 32 - side, 2)
            image[top : top + side, left : left + side] = COLOURS[label]
            boxes.append([left, top, left + side, top + side])
            labels.append(label)
        target = {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}
        return torch.from_numpy(image), target


def collate(samples: list[tuple[Tensor, Boxes]]) -> dict[str, Any]:
    """Stacks the images; the boxes stay a list, as their number differs."""
    images, boxes = zip(*samples, strict=True)
    return {"image": torch.stack(images), "label": list(boxes)}


class Detector(nn.Sequential):
    """Takes images (B, in_channels, H, W), returns (B, 5 + num_classes, H / 8, W / 8): the numbers of each cell.

    These are, in this order: the logit of a box's centre being in the cell, the place of the centre in the cell (0 to
    1), the logarithms of the box's width and height over SIDE, and a logit for each class.
    """

    def __init__(self, num_classes: int, in_channels: int, width: int = 24) -> None:
        deepest = 4 * width
        super().__init__(
            convolution(in_channels, width),
            nn.MaxPool2d(2),
            convolution(width, 2 * width),
            nn.MaxPool2d(2),
            convolution(2 * width, deepest),
            nn.MaxPool2d(2),
            convolution(deepest, deepest),
            nn.Conv2d(deepest, 5 + num_classes, kernel_size=1),
        )


class Detection(Task):
    """The score `found` is the share of the cells with a box that get a probability above `threshold`.

    Images without a box count in the loss, and not in the score.
    """

    def __init__(self, dataset: Any, threshold: float = 0.5, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.num_outputs = len(dataset.classes)
        self.threshold = threshold

    def loss(self, outputs: Tensor, labels: list[Boxes]) -> Tensor:
        cells, target, classes = targets(outputs, labels)
        outputs = outputs.float()
        weight = outputs.new_tensor(5.0)  # most cells have no box
        has_box_loss = binary_cross_entropy_with_logits(outputs[:, 0], cells.float(), pos_weight=weight)
        predicted = outputs.permute(0, 2, 3, 1)[cells]  # (boxes, 5 + classes)
        boxes = max(1, len(classes))  # the mean over no boxes would be NaN
        box_loss = smooth_l1_loss(predicted[:, 1:5], target, reduction="sum") / (4 * boxes)
        class_loss = cross_entropy(predicted[:, 5:], classes, reduction="sum") / boxes
        return has_box_loss + box_loss + class_loss

    def scored_mask(self, labels: list[Boxes]) -> Tensor:
        return torch.stack(
            [label["labels"].new_tensor(len(label["labels"]) > 0, dtype=torch.bool) for label in labels]
        )

    def scores(self, outputs: Tensor, labels: list[Boxes]) -> dict[str, Tensor]:
        cells, _, _ = targets(outputs, labels)
        hits = cells & (outputs[:, 0].sigmoid() > self.threshold)
        return {"found": hits.sum((1, 2)) / cells.sum((1, 2)).clamp(min=1)}

    def predictions(self, outputs: Tensor) -> list[Boxes]:
        """The boxes of each image, which predict.py writes."""
        return boxes_of(outputs.float(), self.threshold)


def targets(outputs: Tensor, labels: list[Boxes]) -> tuple[Tensor, Tensor, Tensor]:
    """Which cells have a box (B, rows, columns), the four numbers of each box (boxes, 4) and its class (boxes,)."""
    cells = torch.zeros_like(outputs[:, 0], dtype=torch.bool)
    target = cells.new_zeros(*cells.shape, 4, dtype=torch.float32)
    classes = torch.zeros_like(cells, dtype=torch.long)
    for image, label in enumerate(labels):
        boxes = label["boxes"].reshape(len(label["labels"]), 4)  # torch.tensor([]) has one dimension
        left, top, right, bottom = boxes.unbind(1)
        x = (left + right) / 2 / STRIDE
        y = (top + bottom) / 2 / STRIDE
        width = (right - left) / SIDE
        height = (bottom - top) / SIDE
        cell = image, y.long(), x.long()
        cells[cell] = True
        classes[cell] = label["labels"].long()
        target[cell] = torch.stack([x % 1, y % 1, width.log(), height.log()], 1)
    return cells, target[cells], classes[cells]


def boxes_of(outputs: Tensor, threshold: float) -> list[Boxes]:
    """For each image, the boxes whose probability is above `threshold`."""
    predictions = []
    for image in outputs.permute(0, 2, 3, 1):
        probability = image[..., 0].sigmoid()
        rows, columns = (probability > threshold).nonzero(as_tuple=True)
        cells = image[rows, columns]
        x = (columns + cells[:, 1]) * STRIDE
        y = (rows + cells[:, 2]) * STRIDE
        center = torch.stack([x, y], 1)
        half = SIDE / 2 * cells[:, 3:5].exp()
        boxes = torch.cat([center - half, center + half], 1)
        scores = probability[rows, columns]
        predictions.append({"boxes": boxes, "scores": scores, "labels": cells[:, 5:].argmax(1)})
    return predictions


class MeanAveragePrecision:
    """torchmetrics' scores map_map, map_map_50, ... over all test images; none without pycocotools or torchmetrics."""

    def __init__(self) -> None:
        self.metric: Any = None
        if find_spec("torchmetrics") and find_spec("pycocotools"):
            from torchmetrics.detection import MeanAveragePrecision as Metric  # optional

            self.metric = Metric()

    def update(self, outputs: Tensor, labels: list[Boxes]) -> None:
        if self.metric is not None:
            self.metric.update(boxes_of(outputs, THRESHOLD), labels)

    def compute(self) -> dict[str, Any]:
        return {} if self.metric is None else self.metric.compute()

    def reset(self) -> None:
        if self.metric is not None:
            self.metric.reset()
