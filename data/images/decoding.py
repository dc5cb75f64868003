"""Decodes a box of an image file with the first decoder that reads it (data/images/decoders.py), else with Pillow."""

import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from data.errors import DataError

JPEG = b"\xff\xd8\xff"  # the first bytes of JPEGs
LARGE = 1 << 18  # bytes of a JPEG from which reading its size first, with Pillow (40 us), is worth the time

Size = tuple[int, int]  # width, height
Box = tuple[int, int, int, int]  # left, top, right, bottom
Crop = Callable[[Size], Box]  # chooses a box in an upright image of that size; the same box at each call
Decoder = Callable[[bytes, Crop], torch.Tensor | None]  # see data/images/decoders.py


def decode(data: bytes, crop: Crop, enough: float = math.inf, decoders: Sequence[Decoder] = ()) -> torch.Tensor:
    """Decodes the box that `crop` chooses in the image in a file's bytes: RGB, uint8 (3, H, W).

    The EXIF orientation is applied and transparency is dropped. If both sides of the box have at least 2, 4 or 8 times
    `enough` pixels, it may be returned at 1/2, 1/4 or 1/8 of its size, which saves most of the work.
    """
    if not data:
        raise ValueError("the file is empty")
    scale = 1
    if data.startswith(JPEG) and len(data) >= LARGE and enough < math.inf:
        with Image.open(io.BytesIO(data)) as file:
            left, top, right, bottom = crop(upright_size(file))
            scale = max(1, int(min(right - left, bottom - top) / enough))
    if scale == 1:
        for decoder in decoders:
            pixels = decoder(data, crop)
            if pixels is not None:
                return pixels
    with Image.open(io.BytesIO(data)) as file:
        size = upright_size(file)
        if scale > 1:
            file.draft("RGB", (file.width // scale, file.height // scale))
        ImageOps.exif_transpose(file, in_place=True)
        box = [side * file.size[axis % 2] // size[axis % 2] for axis, side in enumerate(crop(size))]
        image = file.crop((box[0], box[1], box[2], box[3]))
        if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip
            image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@contextmanager
def image_errors(name: str, advice: str = "replace or remove it") -> Iterator[None]:
    """Turns any exception of the block, which reads an image, into a DataError with the image's name."""
    try:
        yield
    except Exception as error:  # for damaged files Pillow raises OSError, SyntaxError, ValueError and others
        name = os.fsencode(name).decode(errors="backslashreplace")  # so that it can be printed
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{name} cannot be read as an image ({reason}); {advice}") from error


def upright_size(image: Image.Image) -> Size:
    sideways = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return image.size[::-1] if sideways else image.size
