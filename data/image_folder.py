"""ImageFiles: samples in image files, JPEGs and others. ImageFolder: one folder per class."""

import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from data.classes import numbers_in
from data.errors import DataError, check_choice, check_count, home_path, printable
from data.guarded import guarded
from data.images.cache import Cache
from data.images.crops import CroppedDataset, File
from data.images.decoding import image_errors, whole
from data.transform import as_array

log = logging.getLogger(__name__)

VERSION = 2  # of the pixels that data.cache stores: another one makes new caches

LAYOUT = "root/train/CLASS/*.jpg and root/val/CLASS/*.jpg, or other images, also in subfolders of CLASS"
COMMON = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".avif", ".bmp", ".tif", ".tiff")
SUFFIXES = (*COMMON, ".heic", ".heif", ".ppm", ".pgm", ".pbm", ".pnm")  # those of torchvision, webdataset, Pillow
SHOWN = 5  # how many names a sentence lists
# Finds a hidden part of a relative path, which "./a" has not, or the thumbnails of a Synology.
is_hidden = re.compile(r"(?:^|/)(?:\.(?!\.?(?:/|$))|@eaDir(?:/|$))").search


class ImageFiles(CroppedDataset):
    """Samples in image files. A subclass sets `classes` and `labels`, defines `path`, and calls `open_cache`.

    cache: "ram" or "disk": each image is stored when it is first read, for the processes of this machine, and with
    "disk" also for later runs (data/images/cache.py). An image whose shorter side has more than `cache_side` pixels
    (None: what a test sample needs) is resized first. cache_dir, cache_gb: the cache's folder, and its limit.
    """

    @guarded
    def __init__(
        self,
        train: bool,
        cache: str | None = None,
        cache_side: int | None = None,
        cache_dir: str | None = None,
        cache_gb: float | None = None,
        **crops: Any,
    ) -> None:
        super().__init__(train, **crops)
        self.cache_side = self.shorter_side if cache_side is None else cache_side
        check_count("data.cache_side", self.cache_side)
        if cache is not None:
            check_choice("data.cache", cache, ("ram", "disk"))
            self.stored_as = (self.cache_side, self.interpolation)
        self._cache_options = (cache, cache_dir, cache_gb)
        self._pixel_cache: Cache | None = None

    def open_cache(self) -> None:
        """Opens data.cache for the files that `path` names."""
        kind, folder, gigabytes = self._cache_options
        if kind is None or not len(self):
            return
        key = blake2b(f"{VERSION} {self.cache_side} {self.interpolation}".encode(), digest_size=12)
        key.update(os.fsencode(os.path.abspath(self.path(0))))  # because paths may be relative
        for index in range(len(self)):
            key.update(os.fsencode(self.path(index)) + b"\n")
        self._pixel_cache = Cache(kind, folder, key.hexdigest(), len(self), gigabytes)

    def path(self, index: int) -> str:
        """The path of the sample's file."""
        raise NotImplementedError

    def encoded(self, index: int) -> File:
        """The bytes of the file, or with a cache the stored pixels (H, W, 3), and the file's path."""
        path = self.path(index)
        with image_errors(path, self.advice):
            if self._pixel_cache is not None:
                return self._pixel_cache.image(index % len(self), path, self._pixels), path
            with open(path, "rb", buffering=0) as file:
                return file.read(), path

    def _pixels(self, data: bytes, path: str) -> np.ndarray:
        """The pixels (H, W, 3) that are stored of a file's bytes."""
        return as_array(self.stored(self.decoded(data, path, whole, math.inf)))


class ImageFolder(ImageFiles):
    """The images in root/train/CLASS/ (train) or root/val/CLASS/; the classes are the folders in root/train/.

    Without a folder root/val/ there is no test set: see data.val_fraction.

    For the samples and the arguments in `crops` see CroppedDataset. Unlike torchvision's ImageFolder, this one applies
    the EXIF orientation of photographs. Raises DataError for another layout, and when a file is not an image.
    """

    fits_task = "classification"  # its labels are places in `classes`, also if folders have numbers as names
    _has_links = False  # among its files

    @guarded
    def __init__(self, train: bool, root: str | Path | None = None, **crops: Any) -> None:
        super().__init__(train, **crops)
        if not root:
            raise DataError(f"data.root is not set; set it to a folder of images with the layout {LAYOUT}")
        root = home_path(root)
        self.folder = root / ("train" if train else "val")
        self.classes = class_folders(root / "train")
        if not train and not self.folder.exists():
            log.info(
                "%s does not exist%s: the test set is what data.val_fraction splits off train/",
                self.folder,
                or_rename(root, "train"),
            )
            self.files, self.labels = np.array([], dtype=bytes), np.array([], dtype=int)
            return
        present = self.classes if train else class_folders(self.folder)
        numbers = numbers_in(self.classes, present)
        # The folder of each class: in val/ its name may differ in case, or in how an accent is written.
        self._folders = [*self.classes]
        files = list[str]()
        counts = list[int]()  # images of each class that is present
        others = sorted(set(os.listdir(self.folder)) - set(present))  # files that are not read
        for name, number in zip(present, numbers, strict=True):
            folder = self.folder / name
            if number < 0 or (name != self.classes[number] and self.classes[number] in present):
                raise DataError(
                    f"{folder} is a class that {root / 'train'} does not have: remove it, or rename it to one of these"
                )
            images, left_out, are_links = find_images(folder)
            if not images:
                raise DataError(f"{folder} has no images ({', '.join(SUFFIXES)}); add some or remove it")
            self._folders[number] = name
            files += images
            self._has_links |= are_links
            counts.append(len(images))
            others += [f"{name}/{other}" for other in left_out]
        warn_of_left_out(self.folder, others)
        # Arrays, because forked workers share them but end up copying lists. Bytes, as file names need not be UTF-8.
        self.files = np.array(list(map(os.fsencode, files)))
        self.labels = np.repeat(numbers, counts)
        self.open_cache()

    def sample_ids(self) -> np.ndarray:
        """CLASS/FILE of each image, bytes (N,): the same wherever the folder is. See `one_name`."""
        classes = np.array([os.fsencode(f"{name}/") for name in self.classes])
        names = np.char.add(classes[self.labels], self.files)
        if not self._has_links:
            return names
        return np.array(one_name([self.path(index) for index in range(len(self))], names.tolist()), dtype=names.dtype)

    def path(self, index: int) -> str:
        return f"{self.folder}/{self._folders[self.labels[index]]}/{os.fsdecode(self.files[index])}"


def class_folders(folder: Path) -> tuple[str, ...]:
    """The names of the folders in `folder`, sorted, without hidden ones."""
    for each in (folder.parent, folder):
        if not each.is_dir():
            val = each.parent / "val"
            link = f"; to evaluate {val} alone: ln -s val {each}" if val.is_dir() else ""
            raise DataError(
                f"{each} is not a folder{or_rename(folder.parent)}; images must have the layout {LAYOUT}{link}"
            )
    names = folder_names(folder)
    if not names:
        raise DataError(f"{folder} has no class folders; images must have the layout {LAYOUT}")
    return tuple(names)


def or_rename(root: Path, *used: str) -> str:
    """Names the other folders in `root`, one of which may be the one that is missing; "" if there are none."""
    if root.name == "train":
        return f" (or is data.root={root.parent} meant?)"
    names = folder_names(root) if root.is_dir() else []
    others = [name for name in names if name not in used]
    more = ", ..." if len(others) > SHOWN else ""
    return f" (or rename one of these to it: {', '.join(others[:SHOWN])}{more})" if others else ""


def folder_names(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not is_hidden(entry.name))


def find_images(folder: str | Path) -> tuple[list[str], list[str], bool]:
    """The images in a folder and its subfolders, in torchvision's order, and the other files, as relative paths; and
    whether some files are links.

    An image has one of SUFFIXES, in any case; no part of its path is hidden. Links are followed: see `walk`.
    """
    images = list[str]()
    others = list[str]()
    has_links = False
    for below, names, are_links in sorted(walk(folder)):
        has_links |= are_links
        for name in sorted(names):
            path = f"{below}/{name}" if below else name
            if path.lower().endswith(SUFFIXES) and not is_hidden(path):
                images.append(path)
            else:
                others.append(path)
    return images, others, has_links


def walk(folder: str | Path) -> Iterator[tuple[str, list[str], bool]]:
    """Yields each folder in and below `folder`, as a relative path, with the names of its files, and whether some of
    these are links. Follows links.

    Reads each real folder once, and never a folder that contains `folder`: links may lead back to it, or in circles.
    """
    top = str(folder)
    seen = {identity(top)}
    if os.path.islink(top) and seen & ancestors(top):
        return
    waiting = [top]  # not by os.walk, which does not tell what is a link
    while waiting:
        path = waiting.pop()
        try:
            entries = [*os.scandir(path)]
        except OSError as error:
            reason = f"{error.filename} cannot be read ({error.strerror})"
            raise DataError(f"{reason}; allow it, or remove the folder") from error
        folders = sorted(entry.path for entry in entries if is_folder(entry))
        files = [entry for entry in entries if not is_folder(entry)]
        yield path[len(top) :].lstrip(os.sep), [entry.name for entry in files], any(map(os.DirEntry.is_symlink, files))
        for below in sorted(folders, key=os.path.islink):
            number = identity(below)
            leads_back = os.path.islink(below) and number in ancestors(top)
            if number not in seen and not leads_back:
                seen.add(number)
                waiting.append(below)


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to where one may not look
        return False


def identity(folder: str) -> object:
    """What links to one folder have in common. Asking for the real path takes twenty times as long."""
    stat = os.stat(folder)
    return (stat.st_dev, stat.st_ino) if stat.st_ino else os.path.realpath(folder)


def ancestors(folder: str) -> set[object]:
    paths = {*Path(os.path.realpath(folder)).parents, *Path(os.path.abspath(folder)).parents}
    return {identity(str(path)) for path in paths}


def real_paths(paths: Sequence[str]) -> list[str]:
    """The paths of files without links and `..`, so that they are equal where they lead to one file.

    Lists each folder, which tells what is a link, because asking for each file takes long on network drives.
    """
    real_folders = {}
    links = set[tuple[str, str]]()
    for folder in {os.path.dirname(path) for path in paths}:
        real_folders[folder] = folder
        if os.path.isdir(folder or "."):
            real_folders[folder] = os.path.realpath(folder)
            links.update((folder, entry.name) for entry in os.scandir(folder or ".") if entry.is_symlink())
    parts = [os.path.split(path) for path in paths]
    return [
        os.path.realpath(path) if part in links else os.path.join(real_folders[part[0]], part[1])
        for path, part in zip(paths, parts, strict=True)
    ]


def one_name(paths: Sequence[str], names: Sequence[Any]) -> list[Any]:
    """The name of each path's file: the shortest, if the file has several, by links."""
    files = real_paths(paths)
    name_of_file: dict[str, Any] = {}
    for file, name in sorted(zip(files, names, strict=True), key=lambda pair: (len(pair[1]), pair[1])):
        name_of_file.setdefault(file, name)
    return [name_of_file[file] for file in files]


def warn_of_left_out(where: object, names: Sequence[str], count: int | None = None) -> None:
    """Warns in one line that these files of `where` are not read. count: how many, if `names` are only examples."""
    if names:
        log.warning(
            "%s: files that are not read: %d, such as %s", where, count or len(names), printable(example_of(names))
        )


def example_of(names: Sequence[str]) -> str:
    """The first name, preferably not a hidden one; "" if there are none."""
    return min(names, key=lambda name: (bool(is_hidden(name)), name), default="")
