"""ImageFiles: any image files, prepared for a trained network in the same way as its test images."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data.errors import DataError
from data.image_folder import SUFFIXES
from data.images.crops import CroppedDataset, resize
from data.images.decoders import choose
from data.images.decoding import Box, Size, image_errors

GREY = torch.tensor([19595, 38470, 7471]).view(3, 1, 1)  # Pillow's weights of red, green and blue, times 65536


class ImageFiles(CroppedDataset):
    """The images in the files `paths`, without labels: "label" is the file's number.

    Samples are uint8, of `shape` (H, W, C) with 1 or 3 channels. For `interpolation` and `test_crop` see
    CroppedDataset. With test_crop=None, for a network that was trained on images of one size, a sample is the largest
    part in the middle with the aspect ratio of `shape`, resized.
    Raises DataError for another number of channels, and when it reads a file that is not an image.
    """

    def __init__(
        self,
        paths: Sequence[str],
        shape: Sequence[int],
        interpolation: str = "bilinear",
        test_crop: float | None = None,
    ) -> None:
        super().__init__(train=False, image_size=shape[0], interpolation=interpolation, test_crop=test_crop)
        self._resizes_middle = test_crop is None
        if shape[2] not in (1, 3):
            raise DataError(f"the network takes images of {shape[2]} channels; image files can only give 1 or 3")
        self.shape, self._decoders = tuple(shape), choose("auto")
        self._paths = np.array([os.fsencode(path) for path in paths])  # an array, because forked workers share it
        self.labels = np.arange(len(paths))

    def path(self, index: int) -> str:
        return os.fsdecode(self._paths[index])

    def encoded(self, index: int) -> tuple[bytes, str]:
        path = self.path(index)
        with image_errors(path):
            return Path(path).read_bytes(), path

    def _write(self, index: int, image: torch.Tensor, draws: Sequence[float]) -> None:
        height, width, channels = self.shape
        pixels = image if channels == 3 else torch.empty((1, height, width, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        if self._resizes_middle:
            part = self.read(index, lambda size: largest_middle(size, width / height), math.inf)
            resize(part, pixels, self.interpolation)
        else:
            super()._write(index, pixels, draws)
        if channels == 1:
            image[0, 0] = (pixels[0].int() * GREY).sum(0) + 32768 >> 16


def largest_middle(size: Size, ratio: float) -> Box:
    """The largest box in the middle of an image of `size` (width, height) whose width is `ratio` times its height."""
    width, height = min(size[0], round(size[1] * ratio)), min(size[1], round(size[0] / ratio))
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return left, top, left + width, top + height


def image_files(inputs: Sequence[str]) -> list[str]:
    """The paths that `inputs` name, each once. An input is an image, a folder, or a .txt file with a path per line.

    A folder stands for all images below it, sorted: files with one of SUFFIXES that are not hidden.
    Raises DataError if an input does not exist or has no images.
    """
    found: list[str] = []
    for given in inputs:
        if os.path.isdir(given):
            files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(given) for name in names)
            paths = [path for path in files if path.lower().endswith(SUFFIXES) and "/." not in path[len(given) :]]
        elif not os.path.exists(given):
            raise DataError(f"{given} does not exist: give image files, folders or .txt files of paths")
        elif given.endswith(".txt"):
            lines = Path(given).read_text(errors="surrogateescape").split("\n")
            paths = [line for line in lines if line.strip()]
        else:
            paths = [given]
        if not paths:
            raise DataError(f"{given} names no images ({', '.join(SUFFIXES)}): give other files or folders")
        found += paths
    return list(dict.fromkeys(found))
