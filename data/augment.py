"""Augment: erases boxes and mixes images in whole training batches, on the device."""

import math
from typing import Any

import numpy as np
import torch

from data.batch_transform import BatchTransform
from data.errors import Range
from data.transform import Normalize

ERASE_AREA = (0.02, 0.33)  # smallest and largest erased box, as a share of the image's area
ERASE_RATIO = (0.3, 3.3)  # height divided by width, of the widest and of the narrowest erased box
ERASE_ATTEMPTS = 10
RANGES = {"erase": Range(0, 1), "mixup": Range(0), "cutmix": Range(0)}  # of the section augment, see training.config


class Augment:
    """A transform that normalises a batch, then erases boxes and mixes images, with random numbers from `random`.

    normalize: a Normalize or a BatchTransform; None for float images that are normalised already.
    erase: share (0..1) of the images in which a box becomes the mean colour (Zhong et al., arXiv:1708.04896).
    mixup: images are blended in pairs, with weights from Beta(mixup, mixup) (Zhang et al., arXiv:1710.09412).
    cutmix: a box is copied from another image, its area from Beta(cutmix, cutmix) (Yun et al., arXiv:1905.04899).
    0 switches each of them off. If both mixup and cutmix are on, a batch gets one of them, each with probability 1/2.
    image, label: the names of the fields. In a mixed batch the label becomes the share of each class, float32 (B,
    num_classes). The results are those of torchvision's RandomErasing, MixUp and CutMix, but the host never waits for
    the device.
    """

    def __init__(
        self,
        normalize: Normalize | BatchTransform | None,
        num_classes: int,
        erase: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        image: str = "image",
        label: str = "label",
    ) -> None:
        self.normalize = normalize
        self.num_classes = num_classes
        self.erase = erase
        self.image = image
        self.label = label
        alphas = {blend: mixup, paste: cutmix}
        self._mixes = [(mix, alpha) for mix, alpha in alphas.items() if alpha > 0]

    def __call__(self, batch: dict[str, Any], random: Any) -> dict[str, Any]:
        if self.normalize is not None:
            batch = self.normalize(batch, random)  # in new memory, so images may be changed in place below
        elif self.erase or self._mixes:
            batch = {**batch, self.image: batch[self.image].clone()}
        images = batch[self.image]
        if self.erase:
            erase_boxes(images, random_boxes(images, self.erase, random))
        if not self._mixes:
            return batch
        which, seed = random.uniform(2)
        mix, alpha = self._mixes[int(which * len(self._mixes))]
        share = mix(images, np.random.default_rng(int(seed * 2**53)), alpha)
        labels = batch[self.label]
        if labels.is_floating_point():  # they are shares already
            shares = labels.float()
        else:
            shares = torch.zeros((len(images), self.num_classes), device=images.device)
            shares.scatter_(1, labels.long().view(-1, 1), 1.0)
        return {**batch, self.label: shares.lerp(shares.roll(1, 0), 1 - share)}


def blend(images: torch.Tensor, generator: np.random.Generator, alpha: float) -> float:
    """Blends each image with the previous one, in place. Returns the weight (0..1) that the image itself has."""
    share = generator.beta(alpha, alpha)
    images.lerp_(images.roll(1, 0), 1 - share)
    return share


def paste(images: torch.Tensor, generator: np.random.Generator, alpha: float) -> float:
    """Pastes a box of the previous image into each image, in place. Returns the share of pixels outside of the box."""
    height, width = images.shape[2:]
    half = 0.5 * math.sqrt(1 - generator.beta(alpha, alpha))
    y = int(generator.integers(height))
    x = int(generator.integers(width))
    half_height = int(half * height)
    half_width = int(half * width)
    rows = slice(max(0, y - half_height), min(height, y + half_height))
    columns = slice(max(0, x - half_width), min(width, x + half_width))
    box = images[:, :, rows, columns]
    box.copy_(box.roll(1, 0))
    return 1 - box[0, 0].numel() / (height * width)


def random_boxes(images: torch.Tensor, share: float, random: Any) -> torch.Tensor:
    """Draws a box to erase for each image, int64 (4, B): top, bottom, left, right.

    It is the first of ERASE_ATTEMPTS random boxes that is smaller than the image. In a `share` (0..1) of the images it
    has pixels, in the others it is empty.
    """
    count = len(images)
    height, width = images.shape[2:]
    draws = random.uniform(count * (1 + 4 * ERASE_ATTEMPTS)).reshape(count, -1)
    area, ratio, down, right = draws[:, 1:].reshape(count, ERASE_ATTEMPTS, 4).transpose(2, 0, 1)
    smallest, largest = ERASE_AREA
    area = height * width * (smallest + (largest - smallest) * area)
    widest, narrowest = ERASE_RATIO
    ratio = widest * (narrowest / widest) ** ratio
    heights = np.rint(np.sqrt(area * ratio))
    widths = np.rint(np.sqrt(area / ratio))
    fits = (heights < height) & (widths < width)
    chosen = (np.arange(count), fits.argmax(axis=1))
    is_erased = fits[chosen] & (draws[:, 0] < share)
    heights = heights[chosen] * is_erased
    widths = widths[chosen] * is_erased
    top = np.floor(down[chosen] * (height - heights + 1))
    left = np.floor(right[chosen] * (width - widths + 1))
    boxes = torch.from_numpy(np.stack([top, top + heights, left, left + widths]).astype(np.int64))
    if images.is_cuda:  # a copy from pageable memory would make the host wait
        boxes = boxes.pin_memory()
    return boxes.to(images.device, non_blocking=True)


def erase_boxes(images: torch.Tensor, boxes: torch.Tensor) -> None:
    """Sets the boxes (4, B) in `images` (B, C, H, W) to 0, in place."""
    top, bottom, left, right = boxes[:, :, None]
    y, x = (torch.arange(side, device=images.device) for side in images.shape[2:])
    rows = (y >= top) & (y < bottom)  # (B, H)
    columns = (x >= left) & (x < right)  # (B, W)
    images.masked_fill_(rows[:, None, :, None] & columns[:, None, None, :], 0.0)
