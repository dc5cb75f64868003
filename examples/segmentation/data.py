"""Shapes: images with a disc and a square, and a class for each pixel. Image and mask are augmented together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from data.fitting import fit


class Shapes:
    """Samples (image, mask): uint8 (size, size, 3), and int64 (size, size) with the class of each pixel.

    train: training samples are mirrored at random, image and mask alike. length: samples. size: side in pixels.
    """

    classes = ("background", "disc", "square")
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

    def __init__(self, train: bool, length: int = 512, size: int = 32) -> None:
        self.train, self.length, self.size = train, length if train else max(8, length // 4), size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng([index, self.train])
        image = random.integers(60, 120, (self.size, self.size, 3), np.uint8)
        mask = np.zeros((self.size, self.size), np.int64)
        rows, columns = np.mgrid[: self.size, : self.size]
        for number, colour in ((1, (220, 80, 40)), (2, (40, 90, 230))):
            y, x = random.integers(6, self.size - 6, 2)
            down, right = np.abs(rows - y), np.abs(columns - x)
            inside = down**2 + right**2 < 25 if number == 1 else np.maximum(down, right) < 5
            mask[inside] = number
            image[inside] = colour
        sample = torch.from_numpy(self.prepare(image)), torch.from_numpy(mask)
        if self.train and torch.rand(()) < 0.5:  # the loader seeds torch for each sample
            return sample[0].flip(1), sample[1].flip(1)
        return sample

    def prepare(self, image: np.ndarray) -> np.ndarray:
        """Brings an image, uint8 (H, W, 3) of any size, to the size of the samples; predict.py does so with files."""
        return fit(image, self.size, self.size)
