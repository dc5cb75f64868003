"""data.decode_on=device: the GPU decodes, crops and resizes images, and workers only read their files.

The order of the samples, their crops and their augmentation are the same as with decode_on=workers. Pixels differ a
little: by two levels at most after resizing; where a GPU's decoder rounds or interpolates colours in another way than
libjpeg-turbo; and in large photographs, which workers decode at a reduced size and the GPU in full.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.errors import DataError
from data.images.crops import CroppedDataset
from data.images.decoders import END, import_torchcodec, upright
from data.images.decoding import cut, jpeg_header, whole

log = logging.getLogger(__name__)

GROUP = 64  # images that are decoded together: they take 2.3 GB on the device if each has 12 megapixels

# (JPEGs, their EXIF orientations, device) -> upright images. A JPEG is uint8 (bytes,) on the host, an image RGB,
# uint8 (3, H, W) on the device. Raises RuntimeError if it cannot read one of the JPEGs.
DecodeJpegs = Callable[[list[Tensor], list[int], torch.device], list[Tensor]]


@dataclass
class EncodedImages:
    """A batch of B image files as they were read, and the random numbers for their crops."""

    data: Tensor  # uint8 (bytes,): the files one after another
    draws: Tensor  # float64 (B, D): the `draws` of CroppedDataset.write, a row per file
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
        data, draws = torch.cat([self.data, other.data]), torch.cat([self.draws, other.draws])
        names, orientations = self.names + other.names, self.orientations + other.orientations
        return EncodedImages(data, draws, self.sizes + other.sizes, names, orientations)

    def to(self, *_: Any, **__: Any) -> EncodedImages:
        """Stays on the host when the batch is moved to a device: decoders read files from there."""
        return self


def jpeg_orientation(data: bytes) -> int:
    """The EXIF orientation (1 to 8) of a complete JPEG of grey or coloured pixels; 0 for other files."""
    header = jpeg_header(data) if data.endswith(END) else None
    return header[1] if header else 0


class DecodeOnDevice:
    """A transform that turns a batch's EncodedImages into uint8 images (B, H, W, 3) on the device of its labels.

    dataset: the training set. Its settings also fit the batches of a test set that was made with the same arguments.
    then: the transform to apply next, also to batches without EncodedImages.
    decode: None for the first GPU decoder that works. The dataset's own decoders read the files that it cannot read,
    such as PNGs, on the CPU, one at a time.
    Raises DataError if no GPU decoder works, and for a damaged file.
    """

    def __init__(self, dataset: CroppedDataset, then: Callable[..., Any], decode: DecodeJpegs | None = None) -> None:
        self.dataset, self.then, self.decode = dataset, then, decode or decoder_of_gpu()
        self._logged = False

    def __call__(self, batch: dict[str, Any], random: Any = None) -> dict[str, Any]:
        if isinstance(batch["image"], EncodedImages):
            batch = {**batch, "image": self._samples(batch["image"], batch["label"].device)}
        return self.then(batch, random)

    def _samples(self, images: EncodedImages, device: torch.device) -> Tensor:
        samples = torch.empty((len(images), *self.dataset.shape), dtype=torch.uint8, device=device)
        files = list(zip(images.data.split(images.sizes), images.orientations, images.names, strict=True))
        draws = images.draws.tolist()
        for start in range(0, len(files), GROUP):
            for row, pixels in enumerate(self._decoded(files[start : start + GROUP], device), start):
                self.dataset.write(partial(cut, pixels), samples[row : row + 1].permute(0, 3, 1, 2), draws[row])
        return samples

    def _decoded(self, files: list[tuple[Tensor, int, str]], device: torch.device) -> list[Tensor]:
        """Decodes files, given with their orientations and names, on the CPU if `decode` cannot."""
        jpegs, turns = [file for file, turn, _ in files if turn], [turn for _, turn, _ in files if turn]
        if device.type != "cpu":
            # Decoders write on a stream of their own, which does not wait for this one: the memory that they get may
            # be that of images of the group before, which are dropped, but not resized yet.
            torch.get_device_module(device).current_stream(device).synchronize()
        try:
            images = iter(self.decode(jpegs, turns, device) if jpegs else ())
            return [next(images) if turn else self._on_cpu(file, name).to(device) for file, turn, name in files]
        except torch.OutOfMemoryError:  # a RuntimeError too, but not about a file
            raise
        except RuntimeError:
            if len(files) > 1:
                return [self._decoded([file], device)[0] for file in files]
            ((file, _, name),) = files
            return [self._on_cpu(file, name).to(device)]

    def _on_cpu(self, file: Tensor, name: str) -> Tensor:
        if not self._logged:
            self._logged = True
            log.info("data.decode_on=device: the CPU decodes %s, and each other file that the GPU cannot read", name)
        return self.dataset.decoded(file.numpy().tobytes(), name, whole, math.inf)


def with_torchcodec(files: list[Tensor], orientations: list[int], device: torch.device) -> list[Tensor]:
    decoded: list[Tensor] = import_torchcodec().decode_jpeg(files, device=device)  # upright
    return decoded


def with_torchvision(files: list[Tensor], orientations: list[int], device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode  # here, because it takes a second

    decoded = torch.ops.image.decode_jpegs_cuda(files, ImageReadMode.RGB.value, device)
    return [upright(pixels, turn) for pixels, turn in zip(decoded, orientations, strict=True)]


def decoder_of_gpu() -> DecodeJpegs:
    """The first decoder that can read a small JPEG on this GPU. Raises DataError if none can."""
    file, reasons = io.BytesIO(), []
    Image.new("RGB", (16, 16)).save(file, "jpeg")
    jpeg = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    for decode in (with_torchcodec, with_torchvision):
        try:
            decode([jpeg], [1], torch.device("cuda"))
            return decode
        except Exception as error:  # a library that does not fit raises OSError, RuntimeError and others
            reasons.append(f"{decode.__name__}: {str(error).partition(chr(10))[0]}")
    raise DataError(
        f"data.decode_on=device: no decoder works on this GPU ({'; '.join(reasons)}); pip install torchcodec, or use "
        "data.decode_on=workers"
    )
