"""Photographs: JPEG files as large as photographs, made from the images that ship with this repository.

Reading and decoding one costs as much as for ImageNet (500x375 pixels, about 60 kB), so a loader has real work to do.
A photograph shows several garments of one class, scaled, turned and coloured, in front of a random background.
"""

import itertools
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock  # comes with torch
from PIL import Image
from tqdm import tqdm

from data.download import DEFAULT_ROOT
from data.errors import explained
from data.fashion import CLASSES, FashionMini
from data.image_folder import ImageFolder
from loaders import available_cores

log = logging.getLogger(__name__)

FOLDER = "photographs"
COUNTS = {"train": 160, "val": 32}  # photographs of each class
GARMENTS = 5  # in each photograph; in val each shipped test image is used about once
SIZE = (500, 375)  # pixels: width, height
BYTES = 100_000  # size of a file, at most
QUALITY = 92  # JPEG quality


class Photographs(ImageFolder):
    """1,600 training and 320 test photographs of ten kinds of clothing.

    root: the folder that has them, or where they are made at first use; that takes seconds and 170 MB. None:
    downloads/photographs in the current folder. For the samples and the other arguments see CroppedDataset in
    data/images/crops.py. Raises DataError if they cannot be written.
    """

    def __init__(self, train: bool, root: str | Path | None = None, **crops: Any) -> None:
        root = Path(root or Path(DEFAULT_ROOT, FOLDER)).expanduser()
        if not root.exists():
            make(root)
        super().__init__(train, root, **crops)


def make(root: Path) -> None:
    """Makes the photographs in a folder beside `root`, and then renames it: `root` is complete or does not exist.

    The first process on a machine makes them. The others wait for it, and then find its files.
    Raises DataError if the disk is full or cannot be written to.
    """
    partial = root.with_name(f".{root.name}.partial")
    lock = root.with_name(f".{root.name}.lock")
    count = sum(COUNTS.values()) * len(CLASSES)
    with explained(
        f"the photographs could not be made in {root.resolve()}",
        "set data.root=FOLDER to a new folder on a disk with enough space",
        OSError,
    ):
        root.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if root.exists():
                return
            log.info("making %s photographs, once: up to %d MB in %s", f"{count:,}", count * BYTES // 10**6, root)
            shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted process
            try:
                write_all(partial, count)
                partial.rename(root)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def write_all(folder: Path, count: int) -> None:
    """Writes the files with a progress bar, in as many threads as this process may use cores: Pillow frees the GIL."""

    def write(seed: int, task: tuple[Path, list[np.ndarray]]) -> None:
        path, garments = task
        photograph(garments, np.random.default_rng(seed)).save(path, quality=QUALITY)

    with ThreadPoolExecutor(available_cores()) as pool:  # a photograph's number is its seed: it is always the same
        done = pool.map(write, itertools.count(), tasks(folder))
        list(tqdm(done, "making photographs", count, leave=False, disable=None))


def tasks(folder: Path) -> Iterator[tuple[Path, list[np.ndarray]]]:
    """For each photograph its file and its garments."""
    for split, count in COUNTS.items():
        images = FashionMini(train=split == "train", pad=0)
        for label, name in enumerate(CLASSES):
            path = folder / split / name.replace("/", " or ")
            path.mkdir(parents=True)
            of_class = images.images[images.labels == label, ..., 0]
            for index in range(count):
                chosen = [of_class[(index * GARMENTS + i) % len(of_class)] for i in range(GARMENTS)]
                yield path / f"{index:04}.jpg", chosen


def photograph(garments: list[np.ndarray], random: np.random.Generator) -> Image.Image:
    """An RGB image of SIZE. garments: uint8 (28, 28) each, black where there is none."""
    width, height = SIZE
    light = random.integers(60, 150)
    blobs = random.integers(light, light + 100, (9, 12, 3)).astype(np.uint8)
    picture = Image.fromarray(blobs).resize(SIZE, Image.Resampling.BICUBIC)
    for garment in garments:
        side = int(random.integers(110, 220))
        grey = Image.fromarray(garment).resize((side, side), Image.Resampling.BICUBIC)
        grey = grey.rotate(random.uniform(-30, 30), Image.Resampling.BICUBIC)
        shades = [(np.arange(256) * share).astype(np.uint8).tolist() for share in random.uniform(0.2, 1, 3)]
        coloured = Image.merge("RGB", [grey.point(shade) for shade in shades])
        place = int(random.integers(width - side)), int(random.integers(height - side))
        picture.paste(coloured, place, grey.point([0] * 24 + [255] * 232))
    # Grain, as a camera's sensor has it: without it a JPEG is small, and quick to decode.
    grain = np.frombuffer(random.bytes(width * height), np.uint8).reshape(height, width, 1) // 10
    pixels = np.asarray(picture)
    return Image.fromarray(np.minimum(pixels, 255 - 25) + grain)
