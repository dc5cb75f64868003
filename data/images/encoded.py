"""EncodedImages: a batch of image files as they were read, for data/images/decode_on_device.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data.images.decoders import END
from data.images.decoding import jpeg_header


@dataclass
class EncodedImages:
    """A batch of B image files, and the random numbers for their crops."""

    data: torch.Tensor  # uint8 (bytes,): the files one after another
    draws: torch.Tensor  # float64 (B, D): the `draws` of CroppedDataset.write, a row per file
    sizes: list[int]  # bytes of each file
    names: list[str]  # for errors
    orientations: list[int]  # see jpeg_orientation

    @classmethod
    def from_files(cls, files: Sequence[tuple[bytes, str]], draws: np.ndarray) -> EncodedImages:
        """files: the content and the name of each. draws: float64 (B, D)."""
        contents, names = [data for data, _ in files], [name for _, name in files]
        data = torch.from_numpy(np.frombuffer(bytearray().join(contents), np.uint8))
        sizes, orientations = list(map(len, contents)), list(map(jpeg_orientation, contents))
        return cls(data, torch.from_numpy(draws), sizes, names, orientations)

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
        """Stays on the host when the batch is moved to a device: decoders read files from there."""
        return self


def jpeg_orientation(data: bytes) -> int:
    """The EXIF orientation (1 to 8) of a complete JPEG of grey or coloured pixels; 0 for other files."""
    header = jpeg_header(data) if data.endswith(END) else None
    return header[1] if header else 0
