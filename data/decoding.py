"""Decodes image files: JPEGs by the fastest way that reads them right, everything else by Pillow."""

import io
import math
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torchvision.io import ImageReadMode

# torchvision.io.decode_jpeg, without the warning at each call that torchvision will drop it; None once it has.
decode_jpeg = getattr(torch.ops.image, "decode_jpeg", None)
JPEG, XMP = b"\xff\xd8\xff", b"http://ns.adobe.com/"  # how JPEGs, and XMP metadata in them, begin
LARGE = 1 << 18  # bytes from which it pays to read the size of a JPEG (40 us) before the pixels

Size = tuple[int, int]  # width, height
Box = tuple[int, int, int, int]  # left, top, right, bottom


def decode(data: bytes, crop: Callable[[Size], Box], enough: float = math.inf) -> torch.Tensor:
    """What `crop` chooses of the image in a file's bytes: RGB, uint8 (3, H, W).

    The image is turned as its EXIF orientation says, and what is transparent loses its transparency. A crop of 2, 4
    or 8 times `enough` pixels on both sides may come at 1/2, 1/4 or 1/8 of its size, which spares most of the work.
    """
    if not data:
        raise ValueError("the file is empty")
    scale, jpeg = 1, data.startswith(JPEG)
    if jpeg and len(data) >= LARGE and enough < math.inf:
        with Image.open(io.BytesIO(data)) as image:
            left, top, right, bottom = crop(upright_size(image))
            scale = max(1, int(min(right - left, bottom - top) / enough))
    # decode_jpeg overlooks an EXIF block that XMP precedes.
    if jpeg and scale == 1 and decode_jpeg and XMP not in data[:64]:
        with suppress(RuntimeError):  # Pillow reads more, and has clearer words for what it cannot read
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            pixels = decode_jpeg(encoded, ImageReadMode.RGB.value, True)  # True: apply an EXIF orientation
            left, top, right, bottom = crop((pixels.shape[2], pixels.shape[1]))
            return pixels[:, top:bottom, left:right]
    with Image.open(io.BytesIO(data)) as image:
        size = upright_size(image)
        if scale > 1:
            image.draft("RGB", (image.width // scale, image.height // scale))
        ImageOps.exif_transpose(image, in_place=True)
        image = image.crop([side * image.size[axis % 2] // size[axis % 2] for axis, side in enumerate(crop(size))])
        if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip
            image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def upright_size(image: Image.Image) -> Size:
    sideways = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return image.size[::-1] if sideways else image.size
