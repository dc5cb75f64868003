"""EncodedImages: a batch of image files as they were read, for data/decode_on_device.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data.decoders import END, jpeg_header


@dataclass
class EncodedImages:
    """Image files, one after another in `data`, uint8 (bytes,), and the random numbers for their crops.

    For each of the B files: its size in bytes; its name in errors; its EXIF orientation, 1 to 8, if it is a complete
    JPEG that any decoder can read, else 0; and in `draws`, float64 (B, D), the row that `CroppedDataset.write` takes.
    A batch that is moved to a device leaves them on the host, where all decoders want them.
    """

    data: torch.Tensor
    draws: torch.Tensor
    sizes: list[int]
    names: list[str]
    orientations: list[int]

    @classmethod
    def of(cls, files: Sequence[tuple[bytes, str]], draws: np.ndarray) -> EncodedImages:
        data = np.frombuffer(bytearray().join(data for data, _ in files), np.uint8)
        sizes, names = [len(data) for data, _ in files], [name for _, name in files]
        return cls(
            torch.from_numpy(data), torch.from_numpy(draws), sizes, names, [orientation(data) for data, _ in files]
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def __add__(self, other: EncodedImages) -> EncodedImages:
        return EncodedImages(
            torch.cat([self.data, other.data]),
            torch.cat([self.draws, other.draws]),
            self.sizes + other.sizes,
            self.names + other.names,
            self.orientations + other.orientations,
        )

    def to(self, *_: Any, **__: Any) -> EncodedImages:
        return self


def orientation(data: bytes) -> int:
    """The EXIF orientation of a complete JPEG of grey or coloured pixels, 1 to 8; 0 for other files."""
    header = jpeg_header(data) if data.endswith(END) else None
    return header[1] if header else 0
