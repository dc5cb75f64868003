"""Packs an image folder into a few large files for data=packed, which reads them fast in any order from any disk.

    python extras/packed/pack_images.py IMAGES PACK                       # pixels: the fastest, and the largest
    python extras/packed/pack_images.py IMAGES PACK --format jpeg         # the files as they are
    python extras/packed/pack_images.py IMAGES PACK --format jpeg --short-side 256   # smaller JPEGs, of --quality 90
    python extras/packed/pack_images.py --verify PACK                     # checks the checksums of all images

IMAGES has the layout of data=image_folder. An image whose shorter side exceeds --short-side is resized, antialiased.
A smaller one keeps its size, and in a pack of JPEGs its file. You may interrupt the script at any time: the same
command continues after the last finished shard. If images have changed meanwhile, make a new pack. packed.py describes
the files of a pack, and README.md compares the formats.
"""

import io
import json
import math
import os
import shlex
import sys
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout  # comes with torch
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.errors import DataError, Range, check_range
from data.image_folder import ImageFolder
from data.images.crops import shrunk
from data.images.decoding import whole
from data.transform import as_array
from extras.packed.packed import VERSION, Packed, entry_type, shard_name
from loaders import WorkerLoader
from training.command_line import value_of
from training.files import read_json, replacing, write_whole
from training.script import parser, run_script

SPLITS = ("train", "val")
DEFAULT_SIDE = {"raw": 256, "jpeg": None}  # pixels


class StoredImages:
    """A dataset of a folder's images as a pack stores them: (bytes, height, width), or the error of a damaged one.

    short_side: pixels; None: images are not resized. quality: 1 to 100, of the JPEGs that are resized.
    """

    def __init__(self, images: ImageFolder, format: str, short_side: int | None, quality: int | None) -> None:
        self._images = images
        self._format = format
        self._short_side = short_side
        self._quality = quality

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[bytes, int, int] | DataError:
        try:
            data, name = self._images.encoded(index)
            pixels = self._images.decoded(data, name, whole, math.inf)
        except DataError as error:
            return error
        stored = shrunk(pixels, self._short_side)
        if self._format == "jpeg" and stored.shape == pixels.shape:
            return data, 0, 0
        array = as_array(stored)
        if self._format == "raw":
            height, width, _ = array.shape
            return array.tobytes(), height, width
        file = io.BytesIO()
        Image.fromarray(array).save(file, "JPEG", quality=self._quality)
        return file.getvalue(), 0, 0


class Packing:
    """A pack that is being written. Its settings are in unfinished.json; a shard is finished once it has its index.

    settings: the arguments of StoredImages. Raises DataError if the folder has other files in it.
    """

    def __init__(self, splits: dict[str, ImageFolder], folder: Path, settings: dict[str, Any]) -> None:
        self.splits = splits
        self.folder = folder
        self.stored = {split: StoredImages(images, **settings) for split, images in splits.items()}
        about: dict[str, Any] = {"version": VERSION, **settings, "classes": splits["train"].classes}
        about["images"] = {split: fingerprint(images) for split, images in splits.items()}
        self.about = json.loads(json.dumps(about))  # with lists for tuples, to compare it with a file's content
        self.is_finished = (folder / "pack.json").exists()
        path = folder / ("pack.json" if self.is_finished else "unfinished.json")
        if path.exists():
            content = read_json(path)
            if {key: content.get(key) for key in self.about} != self.about:
                raise DataError(f"{folder} is a pack of other images or settings; give another folder")
        elif any(entry.name[0] != "." for entry in folder.iterdir()):
            raise DataError(f"{folder} is not empty; give a new folder for the pack")
        else:
            write_whole(path, json.dumps(self.about))

    def indices(self, split: str) -> list[np.ndarray]:
        """The indices of the split's finished shards."""
        return [np.load(path) for path in sorted(self.folder.glob(f"{split}-*.npy"))]

    def pack(self, split: str, shard_bytes: int, num_workers: int, skip: bool) -> None:
        """Writes the missing shards of a split. Raises DataError for an image that cannot be read, unless `skip`."""
        images = self.splits[split]
        indices = self.indices(split)
        last_numbers = [int(index["number"][-1]) for index in indices if len(index)]
        number = max(last_numbers, default=-1) + 1  # the next image's
        longest_class = max(len(os.fsencode(name)) for name in images.classes)
        name_length = longest_class + 1 + images.files.itemsize
        missing = range(number, len(images))
        with (
            WorkerLoader[Any](
                self.stored[split], 8, sampler=missing, num_workers=num_workers, collate_fn=list
            ) as loader,
            tqdm(total=len(images), initial=number, desc=split, unit="image", disable=None) as bar,
        ):
            items = chain.from_iterable(loader)
            shard = len(indices)
            while number < len(images):
                entries = []
                path = self.folder / shard_name(split, shard)
                with replacing(path) as file:
                    while file.tell() < shard_bytes and number < len(images):
                        item = next(items)
                        if not isinstance(item, DataError):
                            entries.append(entry(images, number, file.tell(), shard, item))
                            file.write(item[0])
                        elif skip:
                            bar.write(f"left out: {item}")
                        else:
                            raise DataError(f"{item}, or leave it out with --skip")
                        number += 1
                        bar.update()
                with replacing(path.with_suffix(".npy")) as file:
                    np.save(file, np.array(entries, entry_type(name_length)))
                shard += 1

    def finish(self) -> None:
        """Writes pack.json. Raises DataError for a split without images."""
        for split in SPLITS:
            if not sum(map(len, self.indices(split))):
                raise DataError(f"none of the {len(self.splits[split]):,} {split} images can be read")
        paths = sorted(path for split in SPLITS for path in self.folder.glob(f"{split}-*"))
        sizes = {path.name: path.stat().st_size for path in paths}
        checksums = {path.name: zlib.crc32(path.read_bytes()) for path in paths if path.suffix == ".npy"}
        write_whole(self.folder / "pack.json", json.dumps({**self.about, "bytes": sizes, "crc32": checksums}) + "\n")
        for path in (self.folder / "unfinished.json", *self.folder.glob(".*")):  # temporary files of a killed process
            path.unlink(missing_ok=True)


def entry(images: ImageFolder, number: int, offset: int, shard: int, item: tuple[bytes, int, int]) -> tuple:
    """The row of an image in the index."""
    data, height, width = item
    label = images.labels[number]
    name = os.fsencode(images.classes[label]) + b"/" + images.files[number]
    return offset, shard, number, len(data), height, width, label, zlib.crc32(data), name


def fingerprint(images: ImageFolder) -> list[int]:
    """The number of images, and a checksum of their names, labels, sizes and modification times."""
    stats = [os.stat(images.path(index)) for index in range(len(images))]
    times = np.array([(stat.st_size, stat.st_mtime_ns) for stat in stats])
    return [len(images), zlib.crc32(images.files.tobytes() + images.labels.tobytes() + times.tobytes())]


def verify(folder: Path) -> None:
    """Reads every image of a pack. Raises DataError for the first one whose checksum is wrong."""
    packs = [Packed(train, folder) for train in (True, False)]
    for packed in packs:
        for index in tqdm(range(len(packed)), "verifying", unit="image", disable=None):
            packed.verified(index)
    print(f"{folder}: the checksums of all {sum(map(len, packs)):,} images are correct")


def main(typed: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("images", type=Path, nargs="?", help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
    options.add_argument("pack", type=Path, help="folder to write")
    options.add_argument("--verify", action="store_true", help="check a pack, write nothing")
    options.add_argument("--format", default="raw", choices=DEFAULT_SIDE, help="raw pixels, or files (raw)")
    options.add_argument("--short-side", type=int, help="pixels; larger images are resized (raw: 256, jpeg: none is)")
    options.add_argument("--quality", type=int, default=90, help="1 to 100, of the JPEGs that are resized (90)")
    options.add_argument("--shard-mb", type=float, default=1024, help="megabytes of a shard (1024)")
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (as many as cores)")
    options.add_argument("--skip", action="store_true", help="leave out images that cannot be read")
    arguments = options.parse_args(typed)
    if arguments.verify:
        return verify(arguments.pack)
    if arguments.images is None:
        raise DataError("give two folders: that of the images, and that of the pack")
    resizes_files = arguments.format == "jpeg" and arguments.short_side is not None
    check_range("--short-side", arguments.short_side, Range(1))
    check_range("--quality", arguments.quality, Range(1, 100))
    check_range("--shard-mb", arguments.shard_mb, Range(0, above=True))
    settings: dict[str, Any] = {
        "format": arguments.format,
        "quality": arguments.quality if resizes_files else None,
        "short_side": arguments.short_side or DEFAULT_SIDE[arguments.format],
    }
    splits = {split: ImageFolder(train=split == "train", root=arguments.images) for split in SPLITS}
    for split_images in splits.values():
        split_images.advice = "replace or remove it"
    if not len(splits["val"]):
        raise DataError(f"{arguments.images}/val does not exist: move some images of {arguments.images}/train there")
    arguments.pack.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(arguments.pack / ".lock", timeout=0):
            packing = Packing(splits, arguments.pack, settings)
            if not packing.is_finished:
                for split in SPLITS:
                    packing.pack(split, max(1, int(arguments.shard_mb * 2**20)), arguments.workers, arguments.skip)
                packing.finish()
    except Timeout:
        raise DataError(f"{arguments.pack} is being packed by another process; wait for it") from None
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command continues after the last finished shard")
    train, val = (len(Packed(is_train, arguments.pack)) for is_train in (True, False))
    command = shlex.join(["python", "train.py", "data=packed", f"data.root={value_of(arguments.pack)}"])
    print(f"{arguments.pack} has {train:,} train and {val:,} val images: {command}")


if __name__ == "__main__":
    run_script(main)
