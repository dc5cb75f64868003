"""ImageFolder: JPEGs and other image files, one folder per class."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError
from data.images.crops import CroppedDataset
from data.images.decoding import image_errors

log = logging.getLogger(__name__)

LAYOUT = "root/train/CLASS/*.jpg and root/val/CLASS/*.jpg (or .jpeg, .png, .webp, .avif, .gif)"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".avif", ".heic", ".gif")  # .heic: an error, not silence


class ImageFolder(CroppedDataset):
    """The images in root/train/CLASS/ (train) or root/val/CLASS/; the classes are the folders in root/train/.

    For the samples and the arguments in `crops` see CroppedDataset. Unlike torchvision's ImageFolder, this one applies
    the EXIF orientation of photographs. It ignores hidden files, and files without one of SUFFIXES.
    Raises DataError if the folders do not have that layout, and when it reads a file that is not an image.
    """

    def __init__(self, train: bool, root: str | Path | None = None, **crops: Any) -> None:
        super().__init__(train, **crops)
        if not root:
            raise DataError(f"data.root is not set; set it to a folder of images with the layout {LAYOUT}")
        root = Path(root).expanduser()
        self.folder = root / ("train" if train else "val")
        for folder in (root, root / "train", self.folder):
            if not folder.is_dir():
                raise DataError(f"{folder} is not a folder; images must have the layout {LAYOUT}")
        self.classes = class_names(root / "train")
        if train and len(self.classes) == 1:
            log.warning("%s has only one class, %s: there is nothing to learn", self.folder, self.classes[0])
        present = class_names(self.folder)
        if unknown := sorted(set(present) - set(self.classes)):
            raise DataError(f"{self.folder / unknown[0]} is a class that {root / 'train'} does not have; remove it")
        # Arrays, because forked workers share them but end up copying lists. Names are bytes, which any encoding fits.
        files = [image_names(self.folder / name) for name in present]
        self.files = np.concatenate(files)
        self.labels = np.repeat([self.classes.index(name) for name in present], list(map(len, files)))

    def path(self, index: int) -> str:
        return f"{self.folder}/{self.classes[self.labels[index]]}/{os.fsdecode(self.files[index])}"

    def encoded(self, index: int) -> tuple[bytes, str]:
        path = self.path(index)
        with image_errors(path), open(path, "rb", buffering=0) as file:
            return file.read(), path


def class_names(folder: Path) -> tuple[str, ...]:
    """The names of the folders in `folder`, sorted, without hidden ones."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise DataError(f"{folder} has no class folders; images must have the layout {LAYOUT}")
    return tuple(names)


def image_names(folder: Path) -> np.ndarray:
    """The names of the images in `folder`, as sorted bytes, without hidden ones."""
    names = [entry.name for entry in os.scandir(folder) if entry.is_file() and entry.name[0] != "."]
    names = sorted(name for name in names if name.lower().endswith(SUFFIXES))
    if not names:
        raise DataError(f"{folder} has no images ({', '.join(SUFFIXES)}); add some or remove the folder")
    return np.array([os.fsencode(name) for name in names])
