"""The index of a tar shard: where each image is, and its label.

The index of a local shard is a hidden file beside it, if the folder is writable. The index of a shard in an object
store is URL.index.npz, which extras/webdataset/index_tars.py writes. If there is none, the whole shard is read once,
and its index is kept in ~/.cache.
"""

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.errors import DataError, explained, home_path, refusals_named
from data.image_folder import SUFFIXES, example_of, is_hidden
from extras.webdataset import object_store
from extras.webdataset.object_store import ATTEMPTS, Version, is_remote
from training.files import write_whole

IMAGES = tuple(suffix[1:] for suffix in SUFFIXES)
LABELS = ("cls", "json")
KINDS = IMAGES + LABELS
AT_ONCE = 32  # shards in an object store whose indices are read at the same time
BLOCK = 4 << 20  # bytes per request when a whole shard is read

# A shard's version; offset, bytes, label and name of each image; how many files are skipped, and the name of one.
Index = tuple[Version, np.ndarray, int, str]
Member = tuple[str, int, int, bytes]  # name, offset, bytes; the content, or b"" if it was not read


def each_shard(function: Callable[[str], Any], shards: list[str], doing: str) -> list[Any]:
    """Calls `function` for each shard, and shows a progress bar. In an object store it reads many shards at a time."""
    if any(map(is_remote, shards)):
        return object_store.in_another_process(_each_shard, function, shards, doing, AT_ONCE)
    return _each_shard(function, shards, doing, 0)


def _each_shard(function: Callable[[str], Any], shards: list[str], doing: str, at_once: int) -> list[Any]:
    first = function(shards[0])  # alone: without a network only one request has to fail
    calls = [partial(function, shard) for shard in shards[1:]]
    results = object_store.answers(calls, at_once)
    bar = tqdm(results, doing, len(calls), unit="shard", leave=False, disable=None, delay=1)
    return [first, *(result for _, result in sorted(bar, key=itemgetter(0)))]


def read_index(shard: str) -> Index:
    """The kept index, or the one beside the shard, or a new one. Raises DataError if the shard cannot be read."""
    version = find_version(shard)
    return load(kept_file(shard), version) or read_index_beside(shard, version) or make_index(shard, version)


def read_index_beside(shard: str, version: Version) -> Index | None:
    """The index in the object store, beside the shard; None if there is none. Raises DataError if it does not fit."""
    beside = f"{shard}.index.npz"
    content = object_store.read_object(beside) if is_remote(shard) else None
    if not content:
        return None
    index = load(io.BytesIO(content), version)
    if index is None:
        raise DataError(
            f"{beside} is the index of another tar, or of an earlier version of this one; run `python "
            f"extras/webdataset/index_tars.py {shard}`"
        )
    return index


def put_index(shard: str) -> int:
    """Writes a shard's index beside it, and replaces one that does not fit. Returns the number of images."""
    version = find_version(shard)
    index = load(kept_file(shard), version) or make_index(shard, version)
    if is_remote(shard):
        object_store.request("put", f"{shard}.index.npz", as_file(*index))
    return len(index[1])


def make_index(shard: str, version: Version) -> Index:
    kept = kept_file(shard)
    others: list[str] = []
    with opened(shard, version) as file:
        samples = arrange(shard, scan(file, others))
    index = version, samples, len(others), example_of(others)
    with suppress(OSError):  # a read-only folder or a full disk: then each run makes the index again
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, as_file(*index))
    return index


@contextmanager
def opened(shard: str, version: Version | None = None, attempts: int = ATTEMPTS) -> Iterator[Any]:
    """Opens a shard as a file. In an object store it is read in blocks, of `version` alone (None: its present one)."""
    what = f"{shard} cannot be read as an uncompressed tar"
    with explained(what, "unpack or replace it", (OSError, tarfile.TarError)), refusals_named(shard):
        if is_remote(shard):
            version = version or object_store.find_version(shard)
            yield io.BufferedReader(RemoteFile(shard, version, attempts), BLOCK)
        else:
            with open(shard, "rb") as file:
                yield file


def find_version(shard: str) -> Version:
    if is_remote(shard):
        return object_store.find_version(shard)
    status = os.stat(shard)
    return Version(status.st_size, str(status.st_mtime_ns))


def kept_file(shard: str) -> Path:
    if not is_remote(shard):
        return Path(shard).with_name(f".{Path(shard).name}.index.npz")
    folder = home_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return folder / "tar_indices" / f"{hashlib.sha256(shard.encode()).hexdigest()}.npz"


def as_file(version: Version, samples: np.ndarray, *others: int | str) -> bytes:
    about = [os.fsencode(str(part)) for part in (*version, *others)]
    file = io.BytesIO()
    np.savez(file, about=np.array(about), samples=samples)
    return file.getvalue()


def load(file: Any, version: Version) -> Index | None:
    """The index in a file; None if the file is missing, damaged, or of another version."""
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(file) as saved:
        size, etag, count, example = map(os.fsdecode, saved["about"].tolist())
        if (int(size), etag) == version:
            return version, saved["samples"], int(count), example
    return None


class RemoteFile(io.RawIOBase):
    """A shard in an object store, as a file."""

    def __init__(self, url: str, version: Version, attempts: int) -> None:
        self._url = url
        self._version = version
        self._attempts = attempts
        self._position = 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._version.bytes)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._version.bytes - self._position))
        read = object_store.RangeReader(self._url, self._position, size, self._version, self._attempts)
        buffer[:size] = read()
        self._position += size
        return size


def scan(file: Any, others: list[str], kinds: Collection[str] = LABELS) -> Iterator[Member]:
    """Yields the images and labels of a shard, from the file's position to its end, with the content of `kinds`.

    Hidden files, links and all other files are skipped, and their names are added to `others`.
    """
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if member.isdir():
                continue
            _, kind = split(member.name)
            if not member.isreg() or kind not in KINDS or is_hidden(member.name):
                others.append(member.name)
                continue
            content = b""
            if kind in kinds:
                file.seek(member.offset_data)
                content = file.read(member.size)
            yield member.name, member.offset_data, member.size, content
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end of the file
            raise tarfile.ReadError(f"the header at byte {tar.offset:,} is damaged")


def split(name: str) -> tuple[str, str]:
    """A member's key, and what follows the first dot of its name, in lower case: webdataset splits names so."""
    folder, slash, name = name.rpartition("/")
    stem, _, kind = name.partition(".")
    return folder + slash + stem, kind.lower()


def arrange(shard: str, members: Iterable[Member]) -> np.ndarray:
    """The samples of a shard as an array, with a row per image."""
    samples = pair(shard, members)
    if not samples:
        raise DataError(f"{shard} has no images; add some, such as KEY.jpg, where KEY has no dot, or leave it out")
    rows = [(os.fsencode(name), offset, size, label) for name, offset, size, label in samples]
    longest_name = max(len(name) for name, *_ in rows)
    longest_label = max(len(label) for *_, label in rows)
    fields = [("name", f"S{longest_name}"), ("offset", "<u8"), ("bytes", "<u4"), ("label", f"S{longest_label}")]
    return np.array(rows, fields)


def pair(shard: str, members: Iterable[Member]) -> list[Member]:
    """The images among a shard's members, each with its label in place of its content."""
    images: dict[str, Member] = {}
    labels: dict[str, Member] = {}
    for member in members:
        key, kind = split(member[0])
        if kind in IMAGES:
            if key in images:
                raise DataError(f"{shard} has two images with the key {key}; rename or remove one")
            images[key] = member
        elif kind == "cls" or key not in labels:
            labels[key] = member
    for key in sorted(images.keys() ^ labels.keys()):
        missing = "label (.cls or .json)" if key in images else "image (.jpg or another)"
        raise DataError(
            f"{shard}: the key {key} has no {missing}; add it, or remove the key. If the tar is read as a stream, the "
            "files of a key have to lie beside one another: tar --sort=name"
        )
    return [(*image[:3], read_label(shard, labels[key])) for key, image in images.items()]


def read_label(shard: str, member: Member) -> bytes:
    name, *_, content = member
    with explained(f"{shard}: {name} has no label", "write a number or a name into it"):
        _, kind = split(name)
        label = json.loads(content)["label"] if kind == "json" else content.decode("utf-8-sig").strip()
        if not isinstance(label, int | str) or label == "":
            raise ValueError(f"it has {label!r}")
        return str(label).encode()
