"""Augment: what is done to whole training batches on the device: boxes erased, images mixed with one another."""

import math
from typing import Any

import numpy as np
import torch

from data.errors import DataError
from data.transform import Normalize

ERASE_AREA, ERASE_RATIO = (0.02, 0.33), (0.3, 3.3)  # of an erased box: share of the image, height to width
ERASE_ATTEMPTS = 10


class Augment:
    """Normalizes a batch, then erases and mixes it; a transform: called with a batch and its random numbers.

    erase: share (0..1) of the images in which a box becomes the mean colour (Zhong et al., arXiv:1708.04896).
    mixup: images are blended in pairs, with weights from Beta(mixup, mixup) (Zhang et al., arXiv:1710.09412).
    cutmix: a box comes from another image, its area from Beta(cutmix, cutmix) (Yun et al., arXiv:1905.04899).
    0 switches each off; of mixup and cutmix a batch has one, either half of the time.

    Of a mixed batch "label" becomes float32 (B, num_classes), each class's share, which cross_entropy takes as well.
    As torchvision's RandomErasing, MixUp and CutMix, but drawn from `random`, and without waiting for the device.
    Raises DataError for a value that cannot be.
    """

    def __init__(
        self, normalize: Normalize, num_classes: int, erase: float = 0.0, mixup: float = 0.0, cutmix: float = 0.0
    ) -> None:
        if not 0 <= erase <= 1:
            raise DataError(f"augment.erase={erase}: give the share of the images, from 0 to 1")
        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            if not 0 <= alpha < math.inf:
                raise DataError(f"augment.{name}={alpha}: give a number from 0; 0 switches it off")
        self.normalize, self.num_classes, self.erase = normalize, num_classes, erase
        self._mixes = [(mix, alpha) for mix, alpha in ((blend, mixup), (paste, cutmix)) if alpha > 0]

    def __call__(self, batch: dict[str, Any], random: Any) -> dict[str, Any]:
        batch = self.normalize(batch, random)  # into new memory, which may be written to here
        images = batch["image"]
        if self.erase:
            erase_boxes(images, erasing_boxes(images, self.erase, random))
        if not self._mixes:
            return batch
        which, seed = random.uniform(2)
        mix, alpha = self._mixes[int(which * len(self._mixes))]
        share = mix(images, np.random.default_rng(int(seed * 2**53)), alpha)
        labels = torch.zeros((len(images), self.num_classes), device=images.device)
        labels.scatter_(1, batch["label"][:, None], 1.0)
        return {**batch, "label": labels.lerp_(labels.roll(1, 0), 1 - share)}


def blend(images: torch.Tensor, generator: np.random.Generator, alpha: float) -> float:
    """Blends each image with the one before it, in place; returns the share that is its own."""
    share = generator.beta(alpha, alpha)
    images.lerp_(images.roll(1, 0), 1 - share)
    return share


def paste(images: torch.Tensor, generator: np.random.Generator, alpha: float) -> float:
    """Pastes a box of the image before it into each, in place; returns the share that is its own."""
    height, width = images.shape[2:]
    half = 0.5 * math.sqrt(1 - generator.beta(alpha, alpha))
    y, x, down, right = generator.integers(height), generator.integers(width), int(half * height), int(half * width)
    top, bottom, left, right = max(0, y - down), min(height, y + down), max(0, x - right), min(width, x + right)
    box = images[:, :, top:bottom, left:right]
    box.copy_(box.roll(1, 0))
    return 1 - (bottom - top) * (right - left) / (height * width)


def erasing_boxes(images: torch.Tensor, share: float, random: Any) -> torch.Tensor:
    """A box for each image, int64 (4, B) on its device: top, bottom, left, right; empty where nothing is erased.

    Of some attempts the first that is smaller than the image counts.
    """
    count, (height, width) = len(images), images.shape[2:]
    draws = random.uniform(count * (1 + 4 * ERASE_ATTEMPTS)).reshape(count, -1)
    area, ratio, down, right = draws[:, 1:].reshape(count, ERASE_ATTEMPTS, 4).transpose(2, 0, 1)
    area = height * width * (ERASE_AREA[0] + (ERASE_AREA[1] - ERASE_AREA[0]) * area)
    ratio = ERASE_RATIO[0] * (ERASE_RATIO[1] / ERASE_RATIO[0]) ** ratio
    heights, widths = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (heights < height) & (widths < width)
    chosen = np.arange(count), fits.argmax(axis=1)
    erased = fits[chosen] & (draws[:, 0] < share)
    heights, widths = heights[chosen] * erased, widths[chosen] * erased
    top, left = np.floor(down[chosen] * (height - heights + 1)), np.floor(right[chosen] * (width - widths + 1))
    boxes = torch.from_numpy(np.stack([top, top + heights, left, left + widths]).astype(np.int64))
    if images.is_cuda:  # from pageable memory the copy would make the host wait
        boxes = boxes.pin_memory()
    return boxes.to(images.device, non_blocking=True)


def erase_boxes(images: torch.Tensor, boxes: torch.Tensor) -> None:
    """Sets the boxes (4, B) in `images` (B, C, H, W) to 0, in place."""
    top, bottom, left, right = boxes[:, :, None]
    y, x = (torch.arange(side, device=images.device) for side in images.shape[2:])
    rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)  # (B, H) and (B, W)
    images.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)
