"""data.decode_on=device: the GPU decodes, crops and resizes images, and workers only read their files.

The order of the samples, their crops and their augmentation are the same as with decode_on=workers. Pixels differ a
little: by two levels at most after resizing; where a GPU's decoder rounds or interpolates colours in another way than
libjpeg-turbo; and in large photographs, which workers decode at a reduced size and the GPU in full.
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

from data.errors import DataError
from data.images.crops import CroppedDataset
from data.images.decoders import import_torchcodec, upright
from data.images.decoding import Crop, cut
from data.images.encoded import EncodedImages

log = logging.getLogger(__name__)

GROUP = 64  # images that are decoded together: they take 2.3 GB on the device if each has 12 megapixels

# (JPEGs, their EXIF orientations, device) -> upright images. A JPEG is uint8 (bytes,) on the host, an image RGB,
# uint8 (3, H, W) on the device. Raises RuntimeError if it cannot read one of the JPEGs.
DecodeJpegs = Callable[[list[Tensor], list[int], torch.device], list[Tensor]]


def check_run(device: str, loader: str) -> None:
    """Raises DataError for a run without a GPU, and for a loader that needs decoded images."""
    if device == "cpu" or not torch.cuda.is_available():
        raise DataError("data.decode_on=device needs a GPU, and this run is on the CPU: use data.decode_on=workers")
    if loader in ("resident", "torch"):
        raise DataError(f"data.decode_on=device: loader={loader} needs decoded images: use loader=prefetch")


class DecodeOnDevice:
    """A transform that turns a batch's EncodedImages into uint8 images (B, H, W, 3) on the device of its labels.

    dataset: the training set. Its settings also fit the batches of a test set that was made with the same arguments.
    then: the transform to apply next, also to batches without EncodedImages.
    decode: None for the first GPU decoder that works. The dataset's own decoders read the files that it cannot read,
    such as PNGs, on the CPU, one at a time.
    Raises DataError if no GPU decoder works, and for a damaged file.
    """

    def __init__(
        self,
        dataset: CroppedDataset,
        then: Callable[[dict[str, Any], Any], dict[str, Any]],
        decode: DecodeJpegs | None = None,
    ) -> None:
        self.dataset, self.then = dataset, then
        self.decode = decode or decoder_of_gpu()
        self._logged = False

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
        """Decodes JPEGs, given with their orientations. None stands for one that `decode` cannot read."""
        if not jpegs:
            return []
        try:
            return list(self.decode([file for file, _ in jpegs], [turn for _, turn in jpegs], device))
        except torch.OutOfMemoryError:  # a RuntimeError too, but not about a file
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
        crop: Crop,
        enough: float,
    ) -> Tensor:
        """Crops `pixels`, the decoded image; if that is None, decodes the file on the CPU. See crops.Read."""
        if pixels is not None:
            return cut(pixels, crop)
        if not self._logged:
            self._logged = True
            log.info("data.decode_on=device: the CPU decodes %s, and each other file that the GPU cannot read", name)
        return self.dataset.decoded(file.numpy().tobytes(), name, crop, enough).to(device)


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
