"""fit: brings an image of any size to the one size that a dataset's images have."""

import numpy as np
import torch
from torch.nn.functional import interpolate


def fit(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Cuts the largest part of aspect ratio width:height out of the middle of `image`, and resizes it to that size.

    image: uint8 (H, W, C), C at least 1. Returns uint8 (height, width, C): bilinear and antialiased, as in Pillow.
    An image that has the size is returned as it is.
    """
    if image.shape[:2] == (height, width):
        return image
    left, top, right, bottom = largest_middle((image.shape[1], image.shape[0]), width / height)
    part = torch.from_numpy(image[top:bottom, left:right].copy()).permute(2, 0, 1)
    resized = interpolate(part[None], (height, width), mode="bilinear", antialias=True)[0]
    return resized.permute(1, 2, 0).contiguous().numpy()


def largest_middle(size: tuple[int, int], ratio: float) -> tuple[int, int, int, int]:
    """The largest box in the middle of an image of `size` (width, height) whose width is `ratio` times its height.

    Returns (left, top, right, bottom) in pixels.
    """
    width, height = min(size[0], round(size[1] * ratio)), min(size[1], round(size[0] / ratio))
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return left, top, left + width, top + height
