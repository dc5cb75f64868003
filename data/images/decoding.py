"""Decodes a box of an image file with the first decoder that reads it (data/images/decoders.py), else with Pillow."""

import io
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from data.errors import DataError

JPEG = b"\xff\xd8\xff"  # the first bytes of JPEGs
LARGE = 1 << 18  # bytes of a JPEG from which it may be decoded at a fraction of its size
XMP = b"http://ns.adobe.com/"  # XMP metadata may have an orientation, or hide the EXIF one: only Pillow finds both

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
    scale = reduction(data, crop, enough)
    if scale == 1:
        for decoder in decoders:
            pixels = decoder(data, crop)
            if pixels is not None:
                return pixels
    with Image.open(io.BytesIO(data)) as file:
        box = crop(upright_size(file))
        if scale > 1:
            file.draft("RGB", (file.width // scale, file.height // scale))
        ImageOps.exif_transpose(file, in_place=True)
        left, top, right, bottom = ((side + scale // 2) // scale for side in box)
        image = file.crop((left, top, right, bottom))
        if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip
            image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def cut(pixels: torch.Tensor, crop: Crop) -> torch.Tensor:
    """The box that `crop` chooses in an upright image (3, H, W)."""
    left, top, right, bottom = crop((pixels.shape[2], pixels.shape[1]))
    return pixels[:, top:bottom, left:right]


def reduction(data: bytes, crop: Crop, enough: float) -> int:
    """How many times smaller than the box a JPEG can be decoded: 8, 4, 2, or 1.

    Both sides of the image have to be multiples of it: else the last pixels would cover less of the image than the
    others, and the box would be shifted.
    """
    header = jpeg_header(data) if len(data) >= LARGE and enough < math.inf else None
    if header is None:
        return 1
    (width, height), orientation = header
    if width * height > (Image.MAX_IMAGE_PIXELS or math.inf):  # Pillow would warn, or refuse
        return 1
    left, top, right, bottom = crop((height, width) if orientation > 4 else (width, height))
    most = min(right - left, bottom - top) / enough
    return next((scale for scale in (8, 4, 2) if scale <= most and width % scale == height % scale == 0), 1)


def can_be_read_whole(data: bytes) -> bool:
    return data.startswith(JPEG) and XMP not in data[:64]


def jpeg_header(data: bytes) -> tuple[Size, int] | None:
    """The size of a JPEG as it is stored, and its EXIF orientation, 1 to 8.

    None if it is not a baseline, extended or progressive JPEG of grey or coloured pixels, or begins with XMP metadata.
    """
    if not can_be_read_whole(data):
        return None
    orientation, position = 1, 2
    with suppress(struct.error):  # the data end before the size
        while True:
            start, marker, length = struct.unpack_from(">BBH", data, position)
            if start != 0xFF or marker == 0xDA:  # pixels, or not a marker
                return None
            if marker in (0xC0, 0xC1, 0xC2):
                bits, height, width, channels = struct.unpack_from(">BHHB", data, position + 4)
                known = bits == 8 and channels in (1, 3) and width * height > 0
                return ((width, height), orientation) if known else None
            if marker == 0xE1 and data.startswith(b"Exif\0\0", position + 4):
                exif = Image.Exif()
                with suppress(Exception):  # Pillow raises SyntaxError, ValueError and others for damaged EXIF blocks
                    exif.load(data[position + 4 : position + 2 + length])
                    orientation = exif.get(ExifTags.Base.Orientation, 1)
                orientation = orientation if orientation in range(1, 9) else 1
            position += 2 + length
    return None


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
