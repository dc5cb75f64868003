"""Keypoints: where in an image a red and a blue disc are. Points are mirrored with their image."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from models.small_cnn import convolution

COLOURS = ((220, 60, 40), (40, 90, 230))  # of the points, in order


class Discs:
    """Samples (image, points): uint8 (size, size, 3), and float32 (2, 2): the x and y of each point, from 0 to 1."""

    mean = (0.4, 0.4, 0.4)
    std = (0.2, 0.2, 0.2)

    def __init__(self, train: bool, length: int = 1024, size: int = 32) -> None:
        self.train = train
        self.length = length if train else max(8, length // 4)
        self.size = size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng([index, self.train])
        image = random.integers(60, 120, (self.size, self.size, 3), np.uint8)
        points = random.uniform(0.1, 0.9, (2, 2)).astype(np.float32)
        ys, xs = (np.mgrid[: self.size, : self.size] + 0.5) / self.size
        for (x, y), colour in zip(points, COLOURS, strict=True):
            image[(xs - x) ** 2 + (ys - y) ** 2 < 0.1**2] = colour
        if self.train and torch.rand(()) < 0.5:  # the loader seeds torch for each sample
            image = image[:, ::-1].copy()
            points[:, 0] = 1 - points[:, 0]
        return torch.from_numpy(image), torch.from_numpy(points)


class Heatmaps(nn.Module):
    """Takes images (B, in_channels, H, W), returns points (B, num_classes, 2): the mean place of each heatmap."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolution(in_channels, width), convolution(width, width))
        self.head = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        heat = self.head(self.layers(images)).float()
        heat = heat.flatten(2).softmax(2).view_as(heat)
        ys, xs = ((torch.arange(side, device=heat.device) + 0.5) / side for side in heat.shape[2:])
        return torch.stack([heat.sum(2) @ xs, heat.sum(3) @ ys], dim=2)


def found(outputs: Tensor, labels: Tensor) -> Tensor:
    """The share of a sample's points that are less than 5 % of the image away, (B,)."""
    return ((outputs - labels).norm(dim=2) < 0.05).float().mean(1)
