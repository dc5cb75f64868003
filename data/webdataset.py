"""WebDataset: images and labels in local tar files (shards), read in any order.

A sample is all members of one shard that have the same name up to the first dot, the key: KEY.jpg with KEY.cls or
KEY.json. When a shard is first used, its headers are read, and its index is saved in a hidden file beside it if the
folder is writable.
"""

import glob
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.errors import DataError
from data.images.crops import CroppedDataset, class_indices
from data.images.decoding import image_errors

IMAGES = ("jpg", "jpeg", "png", "webp")
HOW = "set it to tar files such as data/train-{000000..000009}.tar, data/train-*.tar or a list of them"


class WebDataset(CroppedDataset):
    """The training images in the shards of `urls`, or the test images in those of `test_urls`.

    urls, test_urls: local paths, which may have braces (train-{000000..000009}.tar, {a,b}.tar) and wildcards, or lists
    of them. A label is the text of KEY.cls, a number or a name, or else "label" in KEY.json.
    classes: their names, or a file with a name per line; None: the labels in `urls`, sorted. If classes are given, a
    label that is a number is an index of them.
    For the other arguments and the samples see CroppedDataset.

    Raises DataError for urls that are not local, for shards that are missing, compressed or damaged, for keys without
    an image or a label, and when it reads an image that is damaged.
    """

    def __init__(
        self,
        train: bool,
        urls: str | Sequence[str] | None = None,
        test_urls: str | Sequence[str] | None = None,
        classes: str | Sequence[str] | None = None,
        **crops: Any,
    ) -> None:
        super().__init__(train, **crops)
        shards = find_shards("data.urls", urls) if train else find_shards("data.test_urls", test_urls)
        indices = read_indices(shards)
        self.shards, self._entries = np.array(shards), np.concatenate(indices)
        self._shard = np.repeat(np.arange(len(shards)), [len(index) for index in indices])
        labels = read_labels(indices)
        if classes is not None:
            self.classes = read_classes(classes)
            known = np.arange(len(self.classes)) if labels.dtype.kind == "i" else np.array(self.classes)
        else:
            known = np.unique(labels if train else read_labels(read_indices(find_shards("data.urls", urls))))
            self.classes = tuple(str(value) for value in known)
        remedy = "change the label, or set data.classes to a list of all classes"
        self.labels = class_indices(labels, known, self.path, remedy)

    def path(self, index: int) -> str:
        return f"{self.shards[self._shard[index]]}/{os.fsdecode(self._entries[index]['name'])}"

    def encoded(self, index: int) -> tuple[bytes, str]:
        entry, path = self._entries[index], self.path(index)
        with image_errors(path), open(self.shards[self._shard[index]], "rb", buffering=0) as file:
            return os.pread(file.fileno(), entry["bytes"], entry["offset"]), path


def find_shards(key: str, urls: str | Sequence[str] | None) -> list[str]:
    """The paths that `urls`, the value of `key`, stand for, in this order. Those of a wildcard are sorted."""
    if not urls:
        raise DataError(f"{key} is not set; {HOW}")
    shards = []
    for url in [urls] if isinstance(urls, str) else urls:
        if re.match(r"\w+://|pipe:", url):
            raise DataError(f"{key}={url}: only local files are read; download the shards, then set {key} to them")
        for path in expand_braces(os.path.expanduser(url)):
            found = [path] if os.path.isfile(path) else sorted(glob.glob(path))
            if not found:
                raise DataError(f"{key}={url}: there is no file {path}; {HOW}")
            shards += found
    return shards


def expand_braces(text: str) -> list[str]:
    """Expands {first..last} and {one,other} in `text`, as a shell does."""
    braces = re.search(r"{([^{}]+)}", text)
    if braces is None:
        return [text]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    each = braces[1].split(",")
    if numbers:
        each = [f"{number:0{len(numbers[1])}}" for number in range(int(numbers[1]), int(numbers[2]) + 1)]
    return [result for one in each for result in expand_braces(text[: braces.start()] + one + text[braces.end() :])]


def read_classes(classes: str | Sequence[str]) -> tuple[str, ...]:
    """The names in a list, or in the lines of a file."""
    try:
        names = Path(classes).expanduser().read_text().splitlines() if isinstance(classes, str) else classes
    except (OSError, UnicodeError) as error:
        raise DataError(f"data.classes={classes} cannot be read ({error}); set it to a file or a list") from error
    return tuple(str(name).strip() for name in names)


def read_labels(indices: list[np.ndarray]) -> np.ndarray:
    """The labels in the shards: int64 (N,) if all are integers, else strings."""
    labels = np.concatenate([index["label"] for index in indices])
    with suppress(ValueError, OverflowError):
        return labels.astype(np.int64)
    return np.char.decode(labels, "utf-8")


def read_indices(shards: list[str]) -> list[np.ndarray]:
    """The index of each shard: offset, bytes, label and name of each image in it."""
    with tqdm(shards, desc="reading the shards' indices", unit="shard", leave=False, disable=None, delay=1) as bar:
        return [read_index(shard) for shard in bar]


def read_index(shard: str) -> np.ndarray:
    """Reads a shard's index from the file beside it. If that is missing, outdated or damaged, scans the shard."""
    cached, found = Path(shard).with_name(f".{Path(shard).name}.index.npz"), os.stat(shard)
    stamp = np.array([found.st_size, found.st_mtime_ns])
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(cached) as saved:
        if np.array_equal(saved["stamp"], stamp):
            return saved["index"]
    try:
        index = scan(shard)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{shard} cannot be read as an uncompressed tar ({error}); unpack or replace it") from error
    with suppress(OSError):  # the folder is another user's, or the disk is full: then each start scans again
        partial = Path(f"{cached}.{os.getpid()}.npz")
        try:
            np.savez(partial, stamp=stamp, index=index)
            os.replace(partial, cached)  # atomically; a link in its place is replaced, and the link's target unchanged
        finally:
            partial.unlink(missing_ok=True)
    return index


def scan(shard: str) -> np.ndarray:
    """Reads the headers and the labels of a shard. Returns its index."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, tarfile.TarInfo] = {}
    with open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for member in filter(tarfile.TarInfo.isreg, tar):  # not a folder, or a link to another file
            folder, name = os.path.split(member.name)
            stem, _, kind = name.partition(".")
            key = os.path.join(folder, stem)
            if kind.lower() in IMAGES:
                if key in images:
                    raise DataError(f"{shard} has two images with the key {key}; rename or remove one")
                images[key] = member
            elif kind == "cls" or (kind == "json" and key not in labels):
                labels[key] = member
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
            raise tarfile.ReadError(f"the header at byte {tar.offset:,} is damaged")
        for key in sorted(images.keys() ^ labels.keys()):
            missing = "label (.cls or .json)" if key in images else f"image ({', '.join(IMAGES)})"
            raise DataError(f"{shard}: the key {key} has no {missing}; add it, or remove the key")
        if not images:
            raise DataError(f"{shard} has no images ({', '.join(IMAGES)}); add some, or leave it out")
        texts = [read_label(file.fileno(), shard, labels[key]) for key in images]
    names = [os.fsencode(image.name) for image in images.values()]
    places = [(image.offset_data, image.size) for image in images.values()]
    fields = [("offset", "<u8"), ("bytes", "<u8"), ("label", np.array(texts).dtype), ("name", np.array(names).dtype)]
    return np.array([(*place, text, name) for place, text, name in zip(places, texts, names, strict=True)], fields)


def read_label(file: int, shard: str, member: tarfile.TarInfo) -> bytes:
    """The label in a .cls or .json member; `file` is the shard's descriptor."""
    content = os.pread(file, member.size, member.offset_data)
    try:
        label = json.loads(content)["label"] if member.name.endswith(".json") else content.decode().strip()
        if not isinstance(label, int | str) or label == "":
            raise ValueError(f"it has {label!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{shard}: {member.name} has no label ({error}); write a number or a name into it") from error
    return str(label).encode()
