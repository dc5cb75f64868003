"""ImageFolder: JPEG and PNG files, one folder a class, decoded and cropped as is usual for ImageNet."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data.errors import DataError

LAYOUT = "root/train/CLASS/*.jpg and root/val/CLASS/*.jpg (or .jpeg, .png)"
SUFFIXES = (".jpg", ".jpeg", ".png")
RATIOS = (3 / 4, 4 / 3)  # of width to height: the narrowest and the widest training crop
CROP_ATTEMPTS = 10

Box = tuple[float, float, float, float]  # left, top, right, bottom


class ImageFolder:
    """The images in root/train/CLASS/ (train) or root/val/CLASS/; the classes are the folders in root/train/.

    In training a sample is a random crop of at least `min_area` (0..1) of the image, resized, and mirrored
    half of the time if `flip` (Szegedy et al., arXiv:1409.4842; torchvision's RandomResizedCrop). Otherwise
    it is the middle: the shorter side is resized to image_size * 256 / 224, of which image_size is kept.
    Images are RGB, uint8 (image_size, image_size, 3). Hidden files and other suffixes are ignored.
    Raises DataError when the folders are not as expected, and in `__getitem__` when a file is not an image.
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
        label = self.labels[index]
        path = self.folder / self.classes[label] / os.fsdecode(self._files[index])
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except Exception as error:  # for broken files PIL raises OSError, SyntaxError, ValueError and others
            raise DataError(f"{path} cannot be read as an image ({error}); replace or remove it") from error
        mirrored = False
        if self.train:
            mirror, *uniforms = torch.rand(1 + 4 * CROP_ATTEMPTS).tolist()
            box, mirrored = random_crop(image.size, self.min_area, uniforms), self.flip and mirror < 0.5
        else:
            box = centre_crop(image.size, self.image_size)
        image = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR, box)
        pixels = np.array(image)[:, ::-1].copy() if mirrored else np.array(image)
        return {"image": torch.from_numpy(pixels), "label": torch.tensor(label)}


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


def random_crop(size: tuple[int, int], min_area: float, uniforms: Sequence[float]) -> Box:
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


def centre_crop(size: tuple[int, int], image_size: int) -> Box:
    """The box in an image of `size` (width, height) that is left after resizing and then cropping the middle.

    Resizing that box alone gives the same pixels for less work.
    """
    shorter = image_size * 256 // 224
    width, height = (side * shorter // min(size) for side in size)
    left, top = round((width - image_size) / 2), round((height - image_size) / 2)
    right, bottom = left + image_size, top + image_size
    return left * size[0] / width, top * size[1] / height, right * size[0] / width, bottom * size[1] / height
