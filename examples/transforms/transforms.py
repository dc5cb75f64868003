"""Augmentation of your own, by config: a transform of each image, and one of each batch on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchvision.transforms import v2


def crop_and_flip(size: int, smallest: float) -> v2.Compose:
    """Returns a transform of uint8 images (C, H, W). smallest: the least share (0..1) of the area in a crop."""
    return v2.Compose([v2.RandomResizedCrop(size, scale=(smallest, 1.0)), v2.RandomHorizontalFlip()])


class Speckle:
    """Sets a share of the pixels to 0. It has a generator of its own, which the loader seeds for each sample."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.generator = np.random.default_rng()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        dropped = self.generator.random(image.shape[1:]) < self.share
        return image.masked_fill(torch.from_numpy(dropped), 0)


def noise(images: torch.Tensor, labels: torch.Tensor, strength: float) -> Any:
    """Adds noise to images (B, C, H, W) in 0..1, on their device. As it takes the labels, it returns them too."""
    return (images + strength * torch.randn_like(images)).clamp(0, 1), labels
