"""data.decode_on=device: the GPU decodes, crops and resizes images, and workers only read their files.

The order of the samples, their boxes and all that is random are those of decode_on=workers. Pixels are nearly so:
resizing differs by two levels at most; a GPU's decoder rounds, and interpolates colours, in another way than
libjpeg-turbo; and large photographs are decoded whole, while workers decode those at a reduced size.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from data.crops import CroppedDataset
from data.decoders import import_torchcodec, upright
from data.decoding import Box, Size
from data.encoded import EncodedImages
from data.errors import DataError

log = logging.getLogger(__name__)

GROUP = 64  # images that lie decoded on the device at once: 2.3 GB if each has 12 megapixels

# Decodes JPEGs, each uint8 (bytes,) on the host, of the given EXIF orientations: upright, RGB, uint8 (3, H, W) on the
# device. Raises RuntimeError if it cannot read one of them.
DecodeJpegs = Callable[[list[Tensor], list[int], torch.device], list[Tensor]]


class DecodeOnDevice:
    """A transform: makes uint8 images (B, H, W, 3) of a batch's EncodedImages, on the device that has the labels.

    dataset: whose batches these are; one with the same arguments will do, for the training or the test set.
    then: the transform that is next, and gets batches without EncodedImages too. decode: None for the GPU's decoder.
    Files that `decode` cannot read, such as PNGs, are decoded by the dataset's decoders on the CPU, one at a time.
    Raises DataError if the GPU's decoder cannot be used, and for a damaged file.
    """

    def __init__(
        self,
        dataset: CroppedDataset,
        then: Callable[[dict[str, Any], Any], dict[str, Any]],
        decode: DecodeJpegs | None = None,
    ) -> None:
        self.dataset, self.then = dataset, then
        self.decode = decode or decoder_of_gpu()
        self._told = False

    def __call__(self, batch: dict[str, Any], random: Any = None) -> dict[str, Any]:
        if isinstance(batch["image"], EncodedImages):
            batch = {**batch, "image": self._samples(batch["image"], batch["label"].device)}
        return self.then(batch, random)

    def _samples(self, images: EncodedImages, device: torch.device) -> Tensor:
        side = self.dataset.image_size
        samples = torch.empty((len(images), side, side, 3), dtype=torch.uint8, device=device)
        rows = list(zip(images.data.split(images.sizes), images.orientations, images.names, strict=True))
        draws = images.draws.tolist()
        for start in range(0, len(rows), GROUP):
            group = rows[start : start + GROUP]
            jpegs = [(file, orientation) for file, orientation, _ in group if orientation]
            pixels = iter(self._decoded(jpegs, device))
            for row, (file, orientation, name) in enumerate(group, start):
                read = partial(self._read, next(pixels) if orientation else None, file, name, device)
                self.dataset.write(read, samples[row : row + 1].permute(0, 3, 1, 2), draws[row])
        return samples

    def _decoded(self, jpegs: list[tuple[Tensor, int]], device: torch.device) -> list[Tensor | None]:
        """Decodes JPEGs with their orientations; None stands for one that the device's decoder cannot read."""
        if not jpegs:
            return []
        try:
            return list(self.decode([file for file, _ in jpegs], [turn for _, turn in jpegs], device))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if len(jpegs) == 1:
                return [None]
            return [pixels for jpeg in jpegs for pixels in self._decoded([jpeg], device)]

    def _read(
        self,
        pixels: Tensor | None,
        file: Tensor,
        name: str,
        device: torch.device,
        crop: Callable[[Size], Box],
        enough: float,
    ) -> Tensor:
        """CroppedDataset.read of an image that is on the device already, or of a file."""
        if pixels is not None:
            left, top, right, bottom = crop((pixels.shape[2], pixels.shape[1]))
            return pixels[:, top:bottom, left:right]
        if not self._told:
            self._told = True
            log.info("data.decode_on=device: %s is decoded on the CPU, as is each file that the GPU cannot read", name)
        return self.dataset.decoded(file.numpy().tobytes(), name, crop, enough).to(device)


def with_torchcodec(files: list[Tensor], orientations: list[int], device: torch.device) -> list[Tensor]:
    decoded: list[Tensor] = import_torchcodec().decode_jpeg(files, device=device)  # upright
    return decoded


def with_torchvision(files: list[Tensor], orientations: list[int], device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode  # here, because it takes a second

    decoded = torch.ops.image.decode_jpegs_cuda(files, ImageReadMode.RGB.value, device)
    torch.cuda.current_stream(device).synchronize()  # it may still read the files, whose memory is used again
    return [upright(pixels, turn) for pixels, turn in zip(decoded, orientations, strict=True)]


def decoder_of_gpu() -> DecodeJpegs:
    """The first decoder that can read a small JPEG here. Raises DataError if none can."""
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
