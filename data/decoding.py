"""Decodes image files: JPEGs with the fastest decoder that reads them correctly, all others with Pillow."""

import io
import math
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torchvision.io import ImageReadMode

# torchvision.io.decode_jpeg without its deprecation warning at each call; None if torchvision no longer has it.
decode_jpeg = getattr(torch.ops.image, "decode_jpeg", None)
JPEG, XMP = b"\xff\xd8\xff", b"http://ns.adobe.com/"  # the first bytes of JPEGs, and of XMP metadata in them
LARGE = 1 << 18  # bytes from which it is worth reading the size of a JPEG (40 us) before its pixels

Size = tuple[int, int]  # width, height
Box = tuple[int, int, int, int]  # left, top, right, bottom


def decode(data: bytes, crop: Callable[[Size], Box], enough: float = math.inf) -> torch.Tensor:
    """Decodes the box that `crop` chooses in the image in a file's bytes: RGB, uint8 (3, H, W).

    The EXIF orientation is applied and transparency is dropped. If both sides of the box have at least 2, 4 or 8 times
    `enough` pixels, it may be returned at 1/2, 1/4 or 1/8 of its size, which saves most of the work.
    """
    if not data:
        raise ValueError("the file is empty")
    scale, jpeg = 1, data.startswith(JPEG)
    if jpeg and len(data) >= LARGE and enough < math.inf:
        with Image.open(io.BytesIO(data)) as file:
            left, top, right, bottom = crop(upright_size(file))
            scale = max(1, int(min(right - left, bottom - top) / enough))
    # decode_jpeg does not find an EXIF block that comes after XMP metadata.
    if jpeg and scale == 1 and decode_jpeg and XMP not in data[:64]:
        with suppress(RuntimeError):  # then Pillow reads it, or raises a clearer error
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            pixels = decode_jpeg(encoded, ImageReadMode.RGB.value, True)  # True: apply the EXIF orientation
            left, top, right, bottom = crop((pixels.shape[2], pixels.shape[1]))
            return pixels[:, top:bottom, left:right]
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


def upright_size(image: Image.Image) -> Size:
    sideways = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return image.size[::-1] if sideways else image.size
