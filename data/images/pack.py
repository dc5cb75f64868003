"""The format in which extras/packed and data.cache store images, one after another: RGB, uint8 (H, W, 3), or files.

An image whose shorter side exceeds a limit is resized first. A checksum (CRC-32) of its bytes is stored beside it.
"""

import numpy as np
import torch

from data.images.crops import resized

VERSION = 2


def entry_type(name_length: int) -> np.dtype:
    """The dtype of a pack's index: an image's shard, offset, size, label, checksum (CRC-32) and file name.

    number: the image's index in the folder that was packed. height and width are 0 for an image file.
    """
    numbers = [(name, "<u4") for name in ("shard", "number", "bytes", "height", "width", "label", "crc32")]
    return np.dtype([("offset", "<u8"), *numbers, ("name", f"S{name_length}")])


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05}.bin"


def shrunk(pixels: torch.Tensor, side: int, interpolation: str = "bilinear") -> np.ndarray:
    """An image (3, H, W) as it is stored, (h, w, 3): resized if its shorter side has more than `side` pixels."""
    shorter = min(*pixels.shape[1:], side)
    return resized(pixels, shorter, interpolation).permute(1, 2, 0).contiguous().numpy()
