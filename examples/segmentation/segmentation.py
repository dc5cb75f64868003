"""Segmentation by a U-Net. The mean IoU is a metric of a whole epoch; predict.py writes masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from data.array_dataset import resized_middle
from models.small_cnn import convolution
from training.tasks import Task


class Shapes:
    """Samples (image, mask): uint8 (size, size, 3) with a disc and a square, and the class of each pixel, int64.

    train: training samples are mirrored at random, the image with its mask. length: how many. size: side in pixels.
    """

    classes = ("background", "disc", "square")
    mean = (0.5, 0.5, 0.5)
    std = (0.25, 0.25, 0.25)

    def __init__(self, train: bool, length: int = 512, size: int = 32) -> None:
        self.train = train
        self.length = length if train else max(8, length // 4)
        self.size = size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng([index, self.train])
        image = random.integers(60, 120, (self.size, self.size, 3), np.uint8)
        mask = np.zeros((self.size, self.size), np.int64)
        rows, columns = np.mgrid[: self.size, : self.size]
        for number, colour in ((1, (220, 80, 40)), (2, (40, 90, 230))):
            y, x = random.integers(6, self.size - 6, 2)
            down = np.abs(rows - y)
            right = np.abs(columns - x)
            is_disc = number == 1
            inside = down**2 + right**2 < 25 if is_disc else np.maximum(down, right) < 5
            mask[inside] = number
            image[inside] = colour
        pixels = torch.from_numpy(self.prepare(image))
        classes = torch.from_numpy(mask)
        if self.train and torch.rand(()) < 0.5:  # the loader seeds torch for each sample
            return pixels.flip(1), classes.flip(1)
        return pixels, classes

    def prepare(self, image: np.ndarray) -> np.ndarray:
        """Brings an image, uint8 (H, W, 3) of any size, to the size of the samples. predict.py calls it for files."""
        return resized_middle(image, self.size, self.size)


class UNet(nn.Module):
    """A small U-Net (Ronneberger et al., arXiv:1505.04597).

    Takes images (B, in_channels, H, W) with sides divisible by 4, returns logits (B, num_classes, H, W).
    """

    def __init__(self, num_classes: int, in_channels: int, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(in_channels, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 4 * width)
        self.up = nn.ModuleList([upsample(4 * width, 2 * width), upsample(2 * width, width)])
        self.join = nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.head = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            features = down(images)
            skipped.append(features)
            images = functional.max_pool2d(features, 2)
        images = self.bottom(images)
        for up, join in zip(self.up, self.join, strict=True):
            images = join(torch.cat([up(images), skipped.pop()], dim=1))
        return self.head(images)


def block(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(convolution(channels, width), convolution(width, width))


def upsample(channels: int, width: int) -> nn.Module:
    return nn.ConvTranspose2d(channels, width, kernel_size=2, stride=2)


class Segmentation(Task):
    """Outputs are logits (B, classes, H, W), labels int64 (B, H, W). The score `pixels` is the share of right ones."""

    metric = "miou"
    columns = ("mask",)  # columns of predictions.csv

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.num_outputs = len(dataset.classes)

    def default_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels)

    def scores(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
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
    """Intersection over union: the mean over all classes that occur. torchmetrics.JaccardIndex has more options.

    Labels that are no class, such as those that the loss ignores, do not count.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        self.counts = torch.zeros(self.num_classes, self.num_classes)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        pairs = labels * self.num_classes + outputs.argmax(1)
        is_class = (labels >= 0) & (labels < self.num_classes)
        self.counts += torch.bincount(pairs[is_class].cpu(), minlength=self.num_classes**2).view_as(self.counts)

    def compute(self) -> float:
        right = self.counts.diagonal()
        union = self.counts.sum(0) + self.counts.sum(1) - right
        return float((right / union)[union > 0].mean())
