"""Packs an image folder into a few large files for data=packed, which reads them fast in any order from any disk.

    python scripts/pack_images.py IMAGES PACK                 # pixels; each shorter side is resized to 256
    python scripts/pack_images.py IMAGES PACK --format jpeg   # unchanged files: smaller, but slower to read
    python scripts/pack_images.py --verify PACK               # compares all images with their checksums

IMAGES has the layout of data=image_folder. The script prints how large the pack will be before it writes it. You may
interrupt it at any time: the same command continues after the last finished shard. If images have changed meanwhile,
make a new pack. data/packed.py describes the files of a pack.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout  # comes with torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.errors import DataError, check_choice
from data.image_folder import ImageFolder
from data.images.crops import resized, with_shorter_side
from data.images.decoding import Box, Size
from data.packed import VERSION, Packed, entry_type, shard_name
from loaders import WorkerLoader
from training.files import replacing, write_whole

SPLITS = ("train", "val")
SAMPLED = 30  # images of each split from which the size of the pack is estimated


class StoredImages:
    """A dataset of a folder's images as a pack stores them: (bytes, height, width), or the error of a damaged one."""

    def __init__(self, images: ImageFolder, form: str, short_side: int) -> None:
        self._images, self._form, self._short_side = images, form, short_side

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[bytes, int, int] | DataError:
        try:
            pixels = self._images.read(index, whole, math.inf)
        except DataError as error:
            return error
        if self._form == "jpeg":
            return Path(self._images.path(index)).read_bytes(), 0, 0
        height, width = pixels.shape[1:]
        width, height = with_shorter_side((width, height), min(self._short_side, width, height))
        pixels = resized(pixels, (width, height))
        return pixels.permute(1, 2, 0).contiguous().numpy().tobytes(), height, width


def whole(size: Size) -> Box:
    return 0, 0, *size


class Packing:
    """A pack that is being written. Its settings and its progress are in unfinished.json.

    Raises DataError if the folder has other files in it.
    """

    def __init__(self, splits: dict[str, ImageFolder], folder: Path, form: str, short_side: int) -> None:
        self.splits, self.folder = splits, folder
        about: dict[str, Any] = {
            "version": VERSION,
            "format": form,
            "short_side": short_side if form == "raw" else None,
            "classes": splits["train"].classes,
            "images": {split: fingerprint(data) for split, data in splits.items()},
        }
        self.about = json.loads(json.dumps(about))  # with lists for tuples, to compare it with a file's content
        # For each finished shard, the number of images up to its end.
        self.done: dict[str, list[int]] = {split: [] for split in SPLITS}
        self.is_finished = (folder / "pack.json").exists()
        path = folder / ("pack.json" if self.is_finished else "unfinished.json")
        if path.exists():
            found = json.loads(path.read_text())
            if {key: found.get(key) for key in self.about} != self.about:
                raise DataError(f"{folder} is a pack of other images or settings; give another folder")
            self.done = found["done"]
        elif any(entry.name[0] != "." for entry in folder.iterdir()):
            raise DataError(f"{folder} is not empty; give a new folder for the pack")
        else:
            self._save_progress()

    def images_done(self, split: str) -> int:
        return max(self.done[split], default=0)

    def expected_bytes(self) -> float:
        """Estimates the size of the pack from some images."""
        total = 0.0
        for split, images in self.splits.items():
            some = np.linspace(0, len(images) - 1, min(len(images), SAMPLED)).astype(int).tolist()
            items = [self._stored(split)[index] for index in some]
            total += len(images) * float(
                np.mean([0 if isinstance(item, DataError) else len(item[0]) for item in items])
            )
        return total

    def _stored(self, split: str) -> StoredImages:
        return StoredImages(self.splits[split], self.about["format"], self.about["short_side"] or 0)

    def pack(self, split: str, shard_bytes: int, num_workers: int, skip: bool, bar: tqdm) -> None:
        """Writes the missing shards of a split. Raises DataError for an image that cannot be read, unless `skip`."""
        images, done = self.splits[split], self.done[split]
        number = self.images_done(split)  # of the next image
        settings: dict[str, Any] = {"num_workers": num_workers, "collate_fn": list}
        with WorkerLoader[Any](self._stored(split), 8, sampler=range(number, len(images)), **settings) as loader:
            items = chain.from_iterable(loader)
            while number < len(images):
                entries = []
                with replacing(self.folder / shard_name(split, len(done))) as file:
                    while file.tell() < shard_bytes and number < len(images):
                        item = next(items)
                        if not isinstance(item, DataError):
                            entries.append(entry(images, number, file.tell(), len(done), item))
                            file.write(item[0])
                        elif skip:
                            bar.write(f"left out: {item}")
                        else:
                            raise DataError(f"{item}, or leave it out with --skip")
                        number += 1
                        bar.update()
                names = max(len(os.fsencode(name)) for name in images.classes) + 1 + images.files.itemsize
                with replacing(self._part(split, len(done))) as file:
                    np.save(file, np.array(entries, entry_type(names)))
                done.append(number)
                self._save_progress()

    def finish(self) -> None:
        """Joins the parts of each index, writes pack.json, and removes what only an unfinished pack needs.

        Raises DataError for a split without images.
        """
        files = []
        for split, done in self.done.items():
            entries = np.concatenate([np.load(self._part(split, shard)) for shard in range(len(done))])
            if not len(entries):
                raise DataError(
                    f"none of the {len(self.splits[split]):,} {split} images can be read; check the folder"
                )
            files += [self.folder / shard_name(split, shard) for shard in range(len(done))]
            files.append(self.folder / f"{split}.npy")
            with replacing(files[-1]) as file:
                np.save(file, entries)
        sizes = {path.name: path.stat().st_size for path in files}
        checksums = {path.name: zlib.crc32(path.read_bytes()) for path in files if path.suffix == ".npy"}
        about = {**self.about, "done": self.done, "bytes": sizes, "crc32": checksums}
        write_whole(self.folder / "pack.json", json.dumps(about) + "\n")
        for pattern in ("unfinished.json", "*.part.npy", ".*"):  # .*: temporary files of a killed process
            for path in self.folder.glob(pattern):
                path.unlink()

    def _save_progress(self) -> None:
        write_whole(self.folder / "unfinished.json", json.dumps({**self.about, "done": self.done}))

    def _part(self, split: str, shard: int) -> Path:
        return self.folder / f"{split}-{shard:05}.part.npy"


def entry(images: ImageFolder, number: int, offset: int, shard: int, item: tuple[bytes, int, int]) -> tuple:
    """The row of an image in the index."""
    (data, height, width), label = item, images.labels[number]
    name = os.fsencode(images.classes[label]) + b"/" + images.files[number]
    return offset, shard, len(data), height, width, label, zlib.crc32(data), name


def fingerprint(images: ImageFolder) -> list[int]:
    """The number of images, and a checksum of their names, labels, sizes and modification times."""
    stats = [os.stat(images.path(index)) for index in range(len(images))]
    times = np.array([(stat.st_size, stat.st_mtime_ns) for stat in stats])
    return [len(images), zlib.crc32(images.files.tobytes() + images.labels.tobytes() + times.tobytes())]


def verify(folder: Path) -> None:
    """Reads every image of a pack. Raises DataError for the first one whose checksum is wrong."""
    splits = [Packed(train=split == "train", root=folder) for split in SPLITS]
    total = sum(map(len, splits))
    with tqdm(total=total, desc="verifying", unit="image", disable=None) as bar:
        for packed in splits:
            for index in range(len(packed)):
                packed.verified(index)
                bar.update()
    print(f"{folder}: the checksums of all {total:,} images are correct")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?", help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
    parser.add_argument("pack", type=Path, help="folder to write")
    parser.add_argument("--verify", action="store_true", help="check a pack, write nothing")
    parser.add_argument("--format", default="raw", help="raw or jpeg (raw)")
    parser.add_argument(
        "--short-side", type=int, default=256, help="pixels of raw images; smaller images are not resized (256)"
    )
    parser.add_argument("--shard-mb", type=int, default=1024, help="megabytes after which a new shard begins (1024)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (as many as cores)")
    parser.add_argument("--skip", action="store_true", help="leave out images that cannot be read")
    given = parser.parse_args(arguments)
    if given.verify:
        return verify(given.pack)
    if given.images is None:
        raise DataError("give two folders: that of the images, and that of the pack")
    check_choice("--format", given.format, ("raw", "jpeg"))
    for name, least in (("short_side", 1), ("shard_mb", 1), ("workers", 0)):
        if getattr(given, name) < least:
            raise DataError(f"--{name.replace('_', '-')} {getattr(given, name)}: give a number from {least}")
    splits = {split: ImageFolder(train=split == "train", root=given.images) for split in SPLITS}
    given.pack.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(given.pack / ".lock", timeout=0):
            packing = Packing(splits, given.pack, given.format, given.short_side)
            if not packing.is_finished:
                free, taken = shutil.disk_usage(given.pack).free, packing.expected_bytes()
                print(f"{given.pack} will take about {taken / 1e6:,.1f} MB; {free / 1e6:,.0f} MB are free")
                total, done = sum(map(len, splits.values())), sum(map(packing.images_done, SPLITS))
                with tqdm(total=total, initial=done, desc="packing", unit="image", disable=None) as bar:
                    for split in SPLITS:
                        packing.pack(split, given.shard_mb << 20, given.workers, given.skip, bar)
                packing.finish()
    except Timeout:
        raise DataError(f"{given.pack} is being packed by another process; wait for it") from None
    counts = [f"{len(Packed(train=split == 'train', root=given.pack)):,} {split}" for split in SPLITS]
    print(f"{given.pack} has {' and '.join(counts)} images: python train.py data=packed data.root={given.pack}")


if __name__ == "__main__":
    try:
        main()
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        hint = "" if "--verify" in sys.argv else ": the same command continues after the last finished shard"
        print(f"interrupted{hint}", file=sys.stderr)
        sys.exit(130)
