"""ImageFolder: JPEG, PNG and WebP files, one folder a class, cropped and resized as is usual for ImageNet."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import UnidentifiedImageError

from data.decoding import Box, Size, decode
from data.errors import DataError

LAYOUT = "root/train/CLASS/*.jpg and root/val/CLASS/*.jpg (or .jpeg, .png, .webp)"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
RATIOS = (3 / 4, 4 / 3)  # of width to height: the narrowest and the widest training crop
CROP_ATTEMPTS = 10
DRAWS = 1 + 4 * CROP_ATTEMPTS  # random numbers a training sample takes
LONGEST = 64  # times the shorter side: what evaluation resizes of the longer one


class ImageFolder:
    """The images in root/train/CLASS/ (train) or root/val/CLASS/; the classes are the folders in root/train/.

    In training a sample is a random crop of at least `min_area` (0..1) of the image, resized, and mirrored
    half of the time if `flip` (Szegedy et al., arXiv:1409.4842; torchvision's RandomResizedCrop). Otherwise
    it is the middle: the shorter side is resized to image_size * 256 / 224, of which image_size is kept.
    Images are RGB, uint8 (image_size, image_size, 3), and upright: unlike torchvision's ImageFolder, this one applies
    the EXIF orientation of photographs. Hidden files and other suffixes are ignored.
    Raises DataError when the folders are not as expected, and on reading a file that is not an image.
    """

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, which pretrained networks expect

    def __init__(
        self,
        train: bool,
        root: str | Path | None = None,
        image_size: int = 224,
        min_area: float = 0.08,
        flip: bool = True,
    ) -> None:
        if not root:
            raise DataError(f"data.root is not set; name the folder of the images, laid out as {LAYOUT}")
        if image_size < 1:
            raise DataError(f"data.image_size={image_size} must be at least 1")
        if not 0 < min_area <= 1:
            raise DataError(f"data.min_area={min_area} must be above 0 and at most 1")
        root = Path(root).expanduser()
        self.train, self.image_size, self.min_area, self.flip = train, image_size, min_area, flip
        self.folder = root / ("train" if train else "val")
        for folder in (root, root / "train", self.folder):
            if not folder.is_dir():
                raise DataError(f"{folder} is not a folder; data.root must name one laid out as {LAYOUT}")
        self.classes = class_names(root / "train")
        present = class_names(self.folder)
        if unknown := sorted(set(present) - set(self.classes)):
            raise DataError(f"{self.folder / unknown[0]} is a class that {root / 'train'} lacks; remove it")
        # Arrays, not lists: workers share them instead of copying them.
        files = [image_names(self.folder / name) for name in present]
        labels = [self.classes.index(name) for name in present]
        self._files = np.concatenate(files)
        self.labels = np.repeat(labels, [len(names) for names in files])

    def __len__(self) -> int:
        return len(self.labels)

    def sample_spec(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"image": ((self.image_size, self.image_size, 3), torch.uint8), "label": ((), torch.int64)}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = torch.empty((1, self.image_size, self.image_size, 3), dtype=torch.uint8)
        self._write(index, image.permute(0, 3, 1, 2), torch.rand(DRAWS).tolist() if self.train else ())
        return {"image": image[0], "label": torch.tensor(self.labels[index])}

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        """Writes the samples at `indices` (B,) into out["image"], uint8 (B, H, W, C), and out["label"], int64 (B,).

        Augments as `__getitem__` does, by `random.uniform(DRAWS)`, float64 (B, DRAWS).
        """
        images = out["image"].permute(0, 3, 1, 2)
        draws = random.uniform(DRAWS).tolist() if self.train else [()] * len(indices)
        for row, index in enumerate(indices.tolist()):
            self._write(index, images[row : row + 1], draws[row])
        np.take(self.labels, indices, out=out["label"].numpy())

    def _write(self, index: int, image: torch.Tensor, draws: Sequence[float]) -> None:
        """Writes one image into `image`, a view (1, C, H, W) of memory that lies channels last."""
        path = f"{self.folder}/{self.classes[self.labels[index]]}/{os.fsdecode(self._files[index])}"
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read()
            if self.train:
                pixels = decode(data, lambda size: random_crop(size, self.min_area, draws[1:]), self.image_size)
            else:
                pixels = decode(data, middle)
        except Exception as error:  # for broken files Pillow raises OSError, SyntaxError, ValueError and others
            name = os.fsencode(path).decode(errors="backslashreplace")  # what can be printed
            reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error
            raise DataError(f"{name} cannot be read as an image ({reason}); replace or remove it") from error
        if self.train:
            resize(pixels, image)
            if self.flip and draws[0] < 0.5:
                image.copy_(image.flip(3))
        else:
            resize_and_crop(pixels, image)


def class_names(folder: Path) -> tuple[str, ...]:
    """The names of the folders in `folder`, sorted, without hidden ones."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise DataError(f"{folder} has no class folders in it; data.root must be laid out as {LAYOUT}")
    return tuple(names)


def image_names(folder: Path) -> np.ndarray:
    """The names of the images in `folder`, sorted, without hidden ones; as bytes, which numpy packs best."""
    names = [entry.name for entry in os.scandir(folder) if entry.is_file() and entry.name[0] != "."]
    names = sorted(name for name in names if name.lower().endswith(SUFFIXES))
    if not names:
        raise DataError(f"{folder} has no images ({', '.join(SUFFIXES)}); add some or remove the folder")
    return np.array([os.fsencode(name) for name in names])


def random_crop(size: Size, min_area: float, uniforms: Sequence[float]) -> Box:
    """A box in an image of `size` (width, height), made of 4 * CROP_ATTEMPTS numbers in [0, 1).

    The first attempt that lies within the image counts; if none does, the largest box in the middle.
    """
    width, height = size
    for attempt in range(0, 4 * CROP_ATTEMPTS, 4):
        area, ratio, right, down = uniforms[attempt : attempt + 4]
        area = width * height * (min_area + (1 - min_area) * area)
        ratio = RATIOS[0] * (RATIOS[1] / RATIOS[0]) ** ratio
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(right * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIOS[1])), min(height, round(width / RATIOS[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def middle(size: Size) -> Box:
    """All of an image of `size` (width, height), unless it is so long that resizing it would fill the memory."""
    spare_width, spare_height = (max(0, side - LONGEST * min(size)) // 2 for side in size)
    return spare_width, spare_height, size[0] - spare_width, size[1] - spare_height


def resize_and_crop(pixels: torch.Tensor, image: torch.Tensor) -> None:
    """Writes the middle of `pixels` (C, H, W) into `image` (1, C, h, h)."""
    size, shorter = image.shape[2], image.shape[2] * 256 // 224
    height, width = (side * shorter // min(pixels.shape[1:]) for side in pixels.shape[1:])
    resized = torch.empty((1, height, width, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    resize(pixels, resized)
    top, left = round((height - size) / 2), round((width - size) / 2)
    image.copy_(resized[:, :, top : top + size, left : left + size])


def resize(pixels: torch.Tensor, image: torch.Tensor) -> None:
    """Writes `pixels` (C, H, W) into `image` (1, C, h, w), channels last; interpolate(antialias=True) takes no out."""
    pixels = pixels[None].contiguous(memory_format=torch.channels_last)  # it would copy a crop anyway
    torch.ops.aten._upsample_bilinear2d_aa.out(pixels, image.shape[2:], False, None, None, out=image)
