"""The index of a tar shard: where each image is, and its label.

The index of a local shard is kept in a hidden file beside it, if the folder is writable. That of a shard in an object
store is URL.index.npz, which extras/webdataset/index_tars.py writes. Without it, the shard is read once, and its
index is kept in ~/.cache.
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

from data.errors import DataError, explained
from extras.webdataset import object_store
from extras.webdataset.object_store import ATTEMPTS, Version, is_remote

IMAGES, LABELS = ("jpg", "jpeg", "png", "webp"), ("cls", "json")
KINDS = (*IMAGES, *LABELS)
AT_ONCE = 32  # shards in an object store whose indices are read at the same time
BLOCK = 4 << 20  # bytes that are requested at a time to read a whole shard

Index = tuple[Version, np.ndarray]  # a shard's version; offset, bytes, label and name of each image
Member = tuple[str, int, int, bytes]  # name, offset, bytes; the content, or b"" if that was not read


def each_shard(function: Callable[[str], Any], shards: list[str], what: str) -> list[Any]:
    """Calls `function` for each shard, behind a progress bar. In an object store it reads many at once."""
    if any(map(is_remote, shards)):
        return object_store.in_another_process(_each_shard, function, shards, what, AT_ONCE)
    return _each_shard(function, shards, what, 0)


def _each_shard(function: Callable[[str], Any], shards: list[str], what: str, at_once: int) -> list[Any]:
    first = function(shards[0])  # alone: if there is no network, one request waits for it
    calls = [partial(function, shard) for shard in shards[1:]]
    results = object_store.answers(calls, at_once)
    bar = tqdm(results, what, len(calls), unit="shard", leave=False, disable=None, delay=1)
    return [first, *(result for _, result in sorted(bar, key=itemgetter(0)))]


def read_index(shard: str) -> Index:
    """The index that is kept, or beside the shard, else a new one. Raises DataError if the shard cannot be read."""
    version = find_version(shard)
    if (index := load(kept_file(shard), version)) is None and is_remote(shard):
        beside = f"{shard}.index.npz"
        content = object_store.read_object(beside)
        if content and (index := load(io.BytesIO(content), version)) is None:
            remedy = f"run `python extras/webdataset/index_tars.py {shard}`"
            raise DataError(f"{beside} is the index of another tar, or of an earlier version of this one; {remedy}")
    return version, make_index(shard, version) if index is None else index


def put_index(shard: str) -> int:
    """Puts a shard's index beside it, in place of one that does not fit. Returns the number of images."""
    version = find_version(shard)
    if (index := load(kept_file(shard), version)) is None:
        index = make_index(shard, version)
    if is_remote(shard):
        object_store.request("put", f"{shard}.index.npz", as_file(version, index))
    return len(index)


def make_index(shard: str, version: Version) -> np.ndarray:
    """Makes the index of a shard, and keeps it."""
    kept = kept_file(shard)
    with opened(shard, version) as file:
        index = arrange(shard, scan(file))
    with suppress(OSError):  # the folder is another user's, or the disk is full: then each start makes it again
        unfinished = Path(f"{kept}.{os.getpid()}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(as_file(version, index))
            os.replace(unfinished, kept)  # atomically; a link in its place is replaced, and its target unchanged
        finally:
            unfinished.unlink(missing_ok=True)
    return index


@contextmanager
def opened(shard: str, version: Version | None = None, attempts: int = ATTEMPTS) -> Iterator[Any]:
    """The shard as a file; one in an object store is read in blocks, of `version` only (None: the one that it has).

    Raises DataError if it cannot be read, or the block finds that it is not a tar.
    """
    cause = f"{shard} cannot be read as an uncompressed tar", "unpack or replace it"
    with explained(*cause, (OSError, tarfile.TarError)):
        if is_remote(shard):
            version = version or object_store.find_version(shard)
            yield io.BufferedReader(RemoteFile(shard, version, attempts), BLOCK)
        else:
            with open(shard, "rb") as file:
                yield file


def find_version(shard: str) -> Version:
    if is_remote(shard):
        return object_store.find_version(shard)
    found = os.stat(shard)
    return Version(found.st_size, str(found.st_mtime_ns))


def kept_file(shard: str) -> Path:
    if not is_remote(shard):
        return Path(shard).with_name(f".{Path(shard).name}.index.npz")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return folder / "tar_indices" / f"{hashlib.sha256(shard.encode()).hexdigest()}.npz"


def as_file(version: Version, index: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, version=np.array([str(part) for part in version]), index=index)
    return file.getvalue()


def load(file: Any, version: Version) -> np.ndarray | None:
    """The index in a file; None if that is missing, damaged, or of another version."""
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(file) as saved:
        if saved["version"].tolist() == [str(part) for part in version]:
            return saved["index"]
    return None


class RemoteFile(io.RawIOBase):
    """A shard in an object store, as a file."""

    def __init__(self, url: str, version: Version, attempts: int) -> None:
        self._url, self._version, self._attempts, self._position = url, version, attempts, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._version.bytes)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._version.bytes - self._position))
        part = self._url, self._position, size, self._version, self._attempts
        buffer[:size] = object_store.RangeReader(*part)()
        self._position += size
        return size


def scan(file: Any, kinds: Collection[str] = LABELS) -> Iterator[Member]:
    """Reads the headers of a shard, from where the file is to its end, and the contents of these kinds."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in filter(tarfile.TarInfo.isreg, tar):  # not a folder, or a link to another file
            content = b""
            if split(member.name)[1].lower() in kinds:
                file.seek(member.offset_data)
                content = file.read(member.size)
            yield member.name, member.offset_data, member.size, content
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
            raise tarfile.ReadError(f"the header at byte {tar.offset:,} is damaged")


def split(name: str) -> tuple[str, str]:
    """A member's key, and its name after the first dot."""
    folder, slash, name = name.rpartition("/")
    stem, _, kind = name.partition(".")
    return folder + slash + stem, kind


def arrange(shard: str, members: Iterable[Member]) -> np.ndarray:
    """The index of a shard that has these members."""
    if not (samples := pair(shard, members)):
        raise DataError(f"{shard} has no images ({', '.join(IMAGES)}); add some, or leave it out")
    texts = np.array([label for *_, label in samples])
    names = np.array([os.fsencode(name) for name, *_ in samples])
    fields = [("offset", "<u8"), ("bytes", "<u4"), ("label", texts.dtype), ("name", names.dtype)]
    places = [sample[1:3] for sample in samples]
    return np.array([(*place, text, name) for place, text, name in zip(places, texts, names, strict=True)], fields)


def pair(shard: str, members: Iterable[Member]) -> list[Member]:
    """The images of a shard that has these members, each with its label as the content."""
    images: dict[str, Member] = {}
    labels: dict[str, Member] = {}
    for member in members:
        key, kind = split(member[0])
        if kind.lower() in IMAGES:
            if key in images:
                raise DataError(f"{shard} has two images with the key {key}; rename or remove one")
            images[key] = member
        elif kind == "cls" or (kind == "json" and key not in labels):
            labels[key] = member
    for key in sorted(images.keys() ^ labels.keys()):
        missing = "label (.cls or .json)" if key in images else f"image ({', '.join(IMAGES)})"
        raise DataError(f"{shard}: the key {key} has no {missing}; add it, or remove the key")
    return [(*image[:3], read_label(shard, labels[key])) for key, image in images.items()]


def read_label(shard: str, member: Member) -> bytes:
    """The label in a .cls or .json member."""
    name, *_, content = member
    with explained(f"{shard}: {name} has no label", "write a number or a name into it"):
        label = json.loads(content)["label"] if name.endswith(".json") else content.decode().strip()
        if not isinstance(label, int | str) or label == "":
            raise ValueError(f"it has {label!r}")
        return str(label).encode()
