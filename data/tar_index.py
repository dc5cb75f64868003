"""The index of a tar shard: where each image is, and its label.

A local shard's index is in a hidden file beside it, if the folder is writable. Beside a shard in an object store
scripts/index_tars.py puts URL.index.npz; otherwise its index is kept in ~/.cache. Each holds the shard's version. The
files of DALI's wds2idx (NAME.idx beside NAME.tar in an object store) say where members are; labels are then read.
"""

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import object_store
from data.errors import DataError
from data.object_store import Version

IMAGES, LABELS = ("jpg", "jpeg", "png", "webp"), ("cls", "json")
AT_ONCE = 32  # shards in an object store whose indices are read at the same time
BLOCK = 1 << 22  # bytes that are requested at a time, to read a whole shard

Index = tuple[Version, np.ndarray]  # a shard's version; offset, bytes, label and name of each image


def read_indices(shards: list[str]) -> list[Index]:
    """The index of each shard. Raises DataError for a shard that cannot be read."""
    return list(each_shard(read_index, shards, "reading the shards' indices"))


def each_shard(function: Any, shards: list[str], what: str) -> list[Any]:
    """Calls `function` for each shard, behind a progress bar; for those in an object store in threads."""
    results: list[Any] = [None] * len(shards)
    at_once = AT_ONCE if any(map(object_store.is_remote, shards)) else 0
    calls = [partial(function, shard) for shard in shards]
    with tqdm(total=len(shards), desc=what, unit="shard", leave=False, disable=None, delay=1) as bar:
        for number, result in object_store.as_they_arrive(calls, at_once):
            results[number] = result
            bar.update()
    return results


def read_index(shard: str) -> Index:
    """The index that is kept, or else is beside the shard. If there is none, makes one, and keeps it."""
    version = find_version(shard)
    if (index := load(kept_file(shard), version)) is not None:
        return version, index
    beside = f"{shard}.index.npz"
    if object_store.is_remote(shard) and (content := object_store.read_object(beside)):
        if (index := load(io.BytesIO(content), version)) is None:
            remedy = f"run `python scripts/index_tars.py {shard}` again"
            raise DataError(f"{beside} is the index of another tar, or of an earlier {shard}; {remedy}")
        return version, index
    return version, make_index(shard, version)


def put_index(shard: str) -> int:
    """Puts a shard's index beside it, in place of one that does not fit. Returns the number of images."""
    version = find_version(shard)
    index = load(kept_file(shard), version)
    index = make_index(shard, version) if index is None else index
    if object_store.is_remote(shard):
        object_store.write_object(f"{shard}.index.npz", as_file(version, index))
    return len(index)


def make_index(shard: str, version: Version) -> np.ndarray:
    try:
        if object_store.is_remote(shard) and (listed := object_store.read_object(f"{shard.removesuffix('.tar')}.idx")):
            index = arrange(shard, from_wds2idx(shard, listed, version))
        else:
            with open_shard(shard, version) as file:
                index = arrange(shard, scan(file))
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{shard} cannot be read as an uncompressed tar ({error}); unpack or replace it") from error
    kept = kept_file(shard)
    with suppress(OSError):  # the folder is another user's, or the disk is full: then each start makes it again
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial_file = Path(f"{kept}.{os.getpid()}")
        try:
            partial_file.write_bytes(as_file(version, index))
            os.replace(partial_file, kept)  # atomically; a link in its place is replaced, its target is not changed
        finally:
            partial_file.unlink(missing_ok=True)
    return index


def find_version(shard: str) -> Version:
    if object_store.is_remote(shard):
        return object_store.find_version(shard)
    found = os.stat(shard)
    return Version(found.st_size, str(found.st_mtime_ns))


def kept_file(shard: str) -> Path:
    if not object_store.is_remote(shard):
        return Path(shard).with_name(f".{Path(shard).name}.index.npz")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tar_indices"
    return folder / f"{hashlib.sha256(shard.encode()).hexdigest()}.npz"


def as_file(version: Version, index: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, version=np.array([str(value) for value in version]), index=index)
    return file.getvalue()


def load(file: Any, version: Version) -> np.ndarray | None:
    """The index in a file; None if that is missing, damaged, or of another version."""
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(file) as saved:
        if saved["version"].tolist() == [str(value) for value in version]:
            return saved["index"]
    return None


class RemoteFile(io.RawIOBase):
    """A shard in an object store, as a file."""

    def __init__(self, url: str, version: Version) -> None:
        self._url, self._version, self._position = url, version, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._position, self._version.bytes)[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._version.bytes - self._position))
        buffer[:size] = object_store.read_range(self._url, self._position, size, self._version)
        self._position += size
        return size


def open_shard(shard: str, version: Version) -> Any:
    if object_store.is_remote(shard):
        return io.BufferedReader(RemoteFile(shard, version), BLOCK)
    return open(shard, "rb")


Member = tuple[str, int, int, bytes]  # name, offset, bytes; the content of a label's file, b"" for an image


def scan(file: Any) -> Iterator[Member]:
    """Reads the headers and the labels of a shard, from its beginning to its end."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in filter(tarfile.TarInfo.isreg, tar):  # not a folder, or a link to another file
            content = b""
            if split(member.name)[1] in LABELS:
                file.seek(member.offset_data)
                content = file.read(member.size)
            yield member.name, member.offset_data, member.size, content
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
            raise tarfile.ReadError(f"the header at byte {tar.offset:,} is damaged")


def from_wds2idx(shard: str, listed: bytes, version: Version) -> Iterator[Member]:
    """Reads the labels of the members that a file of wds2idx lists: a line per sample, after one with the format.

    A sample's line has "extension offset bytes name" for each member. Each label is read together with the tar's
    header before it, which shows whether the file belongs to this tar.
    """
    try:
        lines = [os.fsdecode(line).split() for line in listed.splitlines()[1:]]
        places = [line[at : at + 4] for line in lines for at in range(0, len(line), 4)]
        members = [(name, int(offset), int(size)) for _, offset, size, name in places]
        if max(offset + size for _, offset, size in members) > version.bytes:
            raise ValueError(f"the tar has {version.bytes:,} bytes")
        labels = [(offset, size) for name, offset, size in members if split(name)[1] in LABELS]
        starts, ends = [offset - tarfile.BLOCKSIZE for offset, _ in labels], [sum(label) for label in labels]
        contents = dict(zip(labels, object_store.read_ranges(shard, starts, ends), strict=True))
        for (_, size), content in contents.items():
            header = tarfile.TarInfo.frombuf(content[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
            if header.size != size:
                raise ValueError(f"the tar has {header.name} in the place of a label")
    except (ValueError, tarfile.TarError) as error:
        if isinstance(error, DataError):
            raise
        idx = f"{shard.removesuffix('.tar')}.idx"
        raise DataError(
            f"{idx} is not the index of {shard} ({error}); make it again with wds2idx, or remove it"
        ) from error
    for name, offset, size in members:
        yield name, offset, size, contents.get((offset, size), b"")[tarfile.BLOCKSIZE :]


def split(name: str) -> tuple[str, str]:
    """A member's key, and its name from the first dot on."""
    folder, name = os.path.split(name)
    stem, _, kind = name.partition(".")
    return os.path.join(folder, stem), kind


def arrange(shard: str, members: Iterator[Member]) -> np.ndarray:
    """The index of a shard with these members."""
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
    if not images:
        raise DataError(f"{shard} has no images ({', '.join(IMAGES)}); add some, or leave it out")
    texts = np.array([read_label(shard, labels[key]) for key in images])
    names = np.array([os.fsencode(name) for name, *_ in images.values()])
    fields = [("offset", "<u8"), ("bytes", "<u4"), ("label", texts.dtype), ("name", names.dtype)]
    index = np.empty(len(images), fields)
    index["offset"], index["bytes"] = zip(*(member[1:3] for member in images.values()), strict=True)
    index["label"], index["name"] = texts, names
    return index


def read_label(shard: str, member: Member) -> bytes:
    """The label in a .cls or .json member."""
    name, _, _, content = member
    try:
        label = json.loads(content)["label"] if name.endswith(".json") else content.decode().strip()
        if not isinstance(label, int | str) or label == "":
            raise ValueError(f"it has {label!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{shard}: {name} has no label ({error}); write a number or a name into it") from error
    return str(label).encode()
