"""Packed: an image folder that pack_images.py packed into a few large files, which are mapped into memory.

A pack is a folder with
- train-00000.bin, ...: the shards, which hold the images one after another: RGB, uint8 (H, W, 3), or image files;
- train-00000.npy, ...: the index of each shard, an array of `entry_type` with one row per image;
- the same for val; and pack.json: the classes, and the size and the checksum of each file. It is written last: until
  then the folder has an unfinished.json instead.
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, explained, home_path, refusals_named
from data.images.crops import CroppedDataset

HOW = "make one with `python extras/packed/pack_images.py IMAGES PACK`"
VERSION = 2  # of the format


class Packed(CroppedDataset):
    """The training or the validation images of the pack in `root`.

    For the samples and the arguments in `crops` see CroppedDataset; `decoder` is for packs of image files. Each
    process verifies an image's checksum when it reads the image for the first time. Raises DataError if the pack is
    missing, unfinished or damaged.
    """

    advice = "make a new pack"

    def __init__(self, train: bool, root: str | Path | None = None, **crops: Any) -> None:
        super().__init__(train, **crops)
        if not root:
            raise DataError(f"data.root is not set; set it to the folder of a pack, or {HOW}")
        self.folder = home_path(root)
        self._split = "train" if train else "val"
        about = read_about(self.folder)
        indices = []
        for name, expected in about["bytes"].items():
            if not name.startswith(self._split):
                continue
            path = self.folder / name
            with damage_named(path):
                size = path.stat().st_size
                if size != expected:
                    raise ValueError(f"it has {size:,} bytes instead of {expected:,}")
                if path.suffix == ".npy":
                    if zlib.crc32(path.read_bytes()) != about["crc32"][name]:
                        raise ValueError("its checksum is wrong")
                    indices.append(np.load(path))
        self._entries = np.concatenate(indices)
        self.stored_as = (about["short_side"], "bilinear")
        self.classes = tuple(about["classes"])
        self.labels = self._entries["label"].astype(np.int64)
        self._shards: dict[int, np.ndarray] = {}  # the shards that this process has mapped, by number
        self._verified = np.zeros(len(self.labels), bool)  # whether this process has verified each image

    def sample_ids(self) -> np.ndarray:
        """CLASS/FILE of each image, bytes (N,), as the folder that was packed has them."""
        return self._entries["name"]

    def encoded(self, index: int) -> tuple[bytes | np.ndarray, str]:
        """Returns an image file and its name for errors, or the pixels (H, W, 3)."""
        entry = self._entries[index]
        data = self.verified(index)
        if entry["height"]:
            return data.reshape(entry["height"], entry["width"], 3), ""  # cutting a box out of them cannot fail
        return data.tobytes(), f"{name_in(entry)} in {self.folder}"

    def verified(self, index: int) -> np.ndarray:
        """The bytes of an image, uint8 (N,), read-only. Raises DataError if they have changed since it was packed."""
        entry = self._entries[index]
        shard = int(entry["shard"])
        start = int(entry["offset"])
        path = self.folder / shard_name(self._split, shard)
        if shard not in self._shards:
            with damage_named(path):
                self._shards[shard] = np.memmap(path, np.uint8, "r")
        data = self._shards[shard][start : start + int(entry["bytes"])]
        if not self._verified[index] and zlib.crc32(data.data) != entry["crc32"]:
            with damage_named(path):
                raise ValueError(f"the checksum of {name_in(entry)} is wrong")
        self._verified[index] = True
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}  # pickling a mapped file would copy it


def entry_type(name_length: int) -> np.dtype:
    """The dtype of an index: an image's shard, offset, size, label, checksum (CRC-32) and file name.

    number: the image's index in the folder that was packed. height and width are 0 for an image file.
    """
    numbers = [(name, "<u4") for name in ("shard", "number", "bytes", "height", "width", "label", "crc32")]
    return np.dtype([("offset", "<u8"), *numbers, ("name", f"S{name_length}")])


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05}.bin"


def name_in(entry: np.void) -> str:
    return entry["name"].decode(errors="backslashreplace")


def read_about(folder: Path) -> dict[str, Any]:
    """The content of pack.json. Raises DataError if it does not exist or cannot be read."""
    path = folder / "pack.json"
    if not path.exists():
        if (folder / "unfinished.json").exists():
            raise DataError(f"{folder} is an unfinished pack; run the command that began it again")
        raise DataError(f"{folder} is not a pack: it has no pack.json; {HOW}")
    with damage_named(path):
        about = json.loads(path.read_text())
        if not isinstance(about, dict) or about.get("version") != VERSION:
            raise ValueError(f"it does not have version {VERSION}")
    return about


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turns an error of the block into a DataError with the file's name."""
    with explained(f"{path} is damaged", f"copy the pack again, or remove it and {HOW}"), refusals_named(path):
        yield
