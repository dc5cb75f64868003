"""Erasing boxes and mixing images in a whole training batch, on the device: augment.erase, mixup and cutmix."""

import math
from typing import Any

import numpy as np
import torch

from data.errors import Range

ERASE_AREA = (0.02, 0.33)  # smallest and largest erased box, as a share of the image's area
ERASE_RATIO = (0.3, 3.3)  # height divided by width, of the widest and of the narrowest erased box
ERASE_ATTEMPTS = 10
RANGES = {"erase": Range(0, 1), "mixup": Range(0), "cutmix": Range(0)}  # of the section augment, see training.config


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
    """Draws a box to erase for each image (B, C, H, W): int64 (4, B), with its top, bottom, left and right.

    An image is erased with the probability `share` (0..1); the box of another image is empty. For each image
    ERASE_ATTEMPTS boxes are drawn, and the first that is lower and narrower than the image is taken; if none is, the
    box is empty.
    """
    count = len(images)
    height, width = images.shape[2:]
    per_batch = count // random.key.size  # images: a group of batches has a key for each
    draws = random.uniform(per_batch * (1 + 4 * ERASE_ATTEMPTS)).reshape(count, -1)
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
