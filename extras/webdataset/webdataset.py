"""WebDataset: images and labels in tar files (shards), local or in an object store, read in any order.

The members of a shard whose names are equal up to the first dot make one sample: KEY.jpg with KEY.cls or KEY.json.
tar_index.py finds them. Each image is read on its own, so samples can come in any order, and no shard is downloaded.
From an object store each worker requests many images at a time.
"""

import glob
import os
import re
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from data.errors import DataError, as_names, explained, read_lines, refusals_named
from data.image_folder import warn_of_left_out
from data.images.crops import CroppedDataset, File, class_indices, have_numbers
from data.images.stream import CroppedStream, State
from extras.webdataset.object_store import ATTEMPTS, RangeReader, Version, answers, is_remote
from extras.webdataset.tar_index import (
    KINDS,
    Index,
    Member,
    each_shard,
    find_version,
    opened,
    pair,
    read_index,
    scan,
    split,
)

HOW = "set it to tar files such as data/train-{000000..000009}.tar, data/train-*.tar or a list of them"
Files = Iterator[tuple[int, bytes]]  # rows of a batch with their image files


class WebDataset(CroppedDataset):
    """The training images in the shards of `urls`, or the test images in those of `test_urls`.

    urls, test_urls: paths, URLs (s3://, gs://, az://, http://, https://), or lists of them. They may contain braces
    (train-{000000..000009}.tar, {a,b}.tar), paths also wildcards. A label is the text of KEY.cls (a number or a
    name), or else "label" in KEY.json.
    classes: the names of the classes, or a file with a name per line; None: the labels in `urls`, sorted. If classes
    are given, labels that are numbers are indices into them.
    requests: how many images each worker requests from an object store at a time.
    attempts: how often a request is tried.
    For the other arguments and the samples see CroppedDataset.

    Raises DataError for shards that are missing, compressed, damaged or changed since their index was made, for keys
    without an image or a label, for an object store that does not answer, and, while reading, for a damaged image.
    """

    def __init__(
        self,
        train: bool,
        urls: str | Sequence[str] | None = None,
        test_urls: str | Sequence[str] | None = None,
        classes: str | Sequence[str] | None = None,
        requests: int = 64,
        attempts: int = ATTEMPTS,
        **crops: Any,
    ) -> None:
        super().__init__(train, **crops)
        self.attempts = attempts
        key = "data.urls" if train else "data.test_urls"
        shards = find_shards(key, urls if train else test_urls)
        indices = read_indices(shards)
        self.shards = np.array(shards)
        self._versions = [version for version, *_ in indices]
        counts = [len(samples) for _, samples, *_ in indices]
        self._shard = np.repeat(np.arange(len(shards), dtype=np.uint32), counts)
        self._offsets = joined(indices, "offset")
        self._bytes = joined(indices, "bytes")
        self._names = joined(indices, "name")
        others = [f"{shard}/{name}" for shard, (*_, count, name) in zip(shards, indices, strict=True) if count]
        warn_of_left_out(key, others, sum(count for *_, count, _ in indices))
        self._at_once = requests if any(map(is_remote, shards)) else 0
        self._begun: dict[Any, Files] = {}  # files that were requested: of this batch and the next one, at most
        labels = read_labels(indices)
        are_places = False
        if classes is None:
            training_labels = labels if train else read_labels(read_indices(find_shards("data.urls", urls)))
            self.classes = tuple(map(str, np.unique(training_labels)))
        else:
            self.classes = read_classes(classes)
            if have_numbers(self.classes):
                labels = np.char.decode(joined(indices, "label"), "utf-8")
            are_places = labels.dtype.kind == "i"
        self.labels = class_indices(
            labels,
            self.classes,
            self.path,
            "change the label, or set data.classes to a list of all classes",
            are_places,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_begun": {}}

    def path(self, index: int) -> str:
        return f"{self.shards[self._shard[index]]}/{os.fsdecode(self._names[index])}"

    def sample_ids(self) -> np.ndarray:
        """SHARD/NAME of each image, bytes (N,), without the shard's folder."""
        shards = np.array([os.fsencode(os.path.basename(shard) + "/") for shard in self.shards.tolist()])
        return np.char.add(shards[self._shard], self._names)

    def encoded(self, index: int) -> tuple[bytes, str]:
        return self._reader(index)(), self.path(index)

    def will_read(self, indices: np.ndarray) -> None:
        """Requests the files at `indices` (B,) from the object store: this worker reads that batch next."""
        if self._at_once:
            newest = list(self._begun.items())[-1:]
            self._begun = dict(newest)
            self._begun[_request_key(indices)] = self._files(indices)

    def encoded_rows(self, indices: np.ndarray) -> Iterator[tuple[int, File]]:
        files = self._begun.pop(_request_key(indices), None) or self._files(indices)
        return ((row, (data, self.path(indices[row]))) for row, data in files)

    def _files(self, indices: np.ndarray) -> Files:
        return answers(map(self._reader, indices.tolist()), self._at_once)

    def _reader(self, index: int) -> Callable[[], bytes]:
        number = int(self._shard[index])
        start = int(self._offsets[index])
        size = int(self._bytes[index])
        shard = str(self.shards[number])
        if is_remote(shard):
            return RangeReader(shard, start, size, self._versions[number], self.attempts)
        return partial(read_file, shard, start, size, self._versions[number])


class WebDatasetStream(CroppedStream):
    """data.streaming=true: reads each tar from its start to its end, without an index.

    Each worker reads its share of the shards one after the other, in training in random order. An object store is
    read in blocks, so `requests` has no effect.
    Raises DataError for a shard that is compressed or damaged, and for a key without an image or a label.
    """

    like = WebDataset

    def open(self, options: SimpleNamespace) -> Sequence[str] | None:
        key = "data.urls" if self.train else "data.test_urls"
        self.shards = find_shards(key, options.urls if self.train else options.test_urls)
        self.attempts = options.attempts
        self._state: State = {}  # state of the newest iterator
        return options.classes and read_classes(options.classes)

    def state_dict(self) -> State:
        """The position of the newest iterator: the order of its shards, the current shard, and the next byte in it."""
        return dict(self._state)

    def encoded(self, state: State | None) -> Iterator[tuple[bytes, str, str]]:
        info = get_worker_info()
        mine = self.shards if info is None else self.shards[info.id :: info.num_workers]
        order = torch.randperm if self.train else torch.arange  # a loaded state has the order: nothing is drawn
        state = self._state = state or {"order": order(len(mine)).tolist(), "place": 0, "byte": 0}
        while state["place"] < len(mine):
            number = state["order"][state["place"]]
            for end, data, name, label in self.read_shard(mine[number], state["byte"]):
                state["byte"] = end
                yield data, name, label
            state |= {"place": state["place"] + 1, "byte": 0}

    def read_shard(self, shard: str, start: int) -> Iterator[tuple[int, bytes, str, str]]:
        """Yields each sample from byte `start` on: the byte where it ends, its image file, its name, its label."""
        with opened(shard, attempts=self.attempts) as file:
            file.seek(start)
            for _, members in groupby(scan(file, [], KINDS), key_of):
                sample = list(members)
                contents = {name: content for name, *_, content in sample}
                _, offset, size, _ = sample[-1]
                end = offset + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                for name, *_, label in pair(shard, sample):
                    yield end, contents[name], f"{shard}/{name}", label.decode()


def key_of(member: Member) -> str:
    """The key that a sample's members have in common: their name up to the first dot."""
    key, _ = split(member[0])
    return key


def _request_key(indices: np.ndarray) -> tuple[Any, ...]:
    return (
        os.getpid(),
        threading.get_ident(),
        indices.tobytes(),
    )  # differs between threads, and before and after a fork


def read_file(shard: str, start: int, size: int, version: Version) -> bytes:
    with (
        explained(f"{shard} cannot be read", "restore it, or start a new run", OSError),
        refusals_named(shard),
        open(shard, "rb", buffering=0) as file,
    ):
        data = os.pread(file.fileno(), size, start)
    if find_version(shard) != version:
        raise DataError(f"{shard} has changed since its index was read; restore it, or start a new run")
    return data


def find_shards(key: str, urls: str | Sequence[str] | None) -> list[str]:
    """Expands `urls`, the value of the setting `key`, in this order. The matches of a wildcard are sorted."""
    if not urls:
        raise DataError(f"{key} is not set; {HOW}")
    shards = []
    for url in [urls] if isinstance(urls, str) else urls:
        if is_remote(url):
            if re.match(r"\w+://[^/]*@|https?://.*\?", url):
                raise DataError(
                    f"{key} has a URL with a password or a signature, which would be logged; leave it out, and set "
                    "credentials in the environment, for s3://, gs:// or az://"
                )
            if "*" in url:
                raise DataError(f"{key}={url}: wildcards are for local files; write braces, such as {{00..09}}")
            shards += expand_braces(url)
            continue
        for path in map(os.path.expanduser, expand_braces(url)):
            paths = [path] if os.path.isfile(path) else sorted(glob.glob(path))
            if not paths:
                raise DataError(f"{key}={url}: there is no file {os.path.abspath(path)}; {HOW}")
            shards += paths
    return shards


def expand_braces(text: str) -> list[str]:
    """Expands {first..last} and {one,other} in `text`, as a shell does."""
    braces = re.search(r"{([^{}]+)}", text)
    if braces is None:
        return [text]
    before = text[: braces.start()]
    after = text[braces.end() :]
    alternatives = braces[1].split(",")
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    if numbers:
        first, last = numbers.groups()
        alternatives = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    expanded = []
    for alternative in alternatives:
        expanded += expand_braces(f"{before}{alternative}{after}")
    return expanded


def read_classes(classes: str | Sequence[str]) -> tuple[str, ...]:
    names = read_lines("data.classes=", classes) if isinstance(classes, str) else classes
    if not isinstance(names, Sequence):
        raise DataError(f"data.classes={classes}: give a list of names, or a text file with a name per line")
    names = [name.strip() for name in as_names("data.classes", names)]
    if len(set(names)) != max(1, len(names)):
        raise DataError(f"data.classes={classes}: its {len(names)} names must all differ")
    return tuple(names)


def read_indices(shards: list[str]) -> list[Index]:
    return each_shard(read_index, shards, "reading the shards' indices")


def joined(indices: list[Index], name: str) -> np.ndarray:
    return np.concatenate([index[name] for _, index, *_ in indices])


def read_labels(indices: list[Index]) -> np.ndarray:
    """The labels in the shards: int64 (N,) if all are integers, else strings."""
    labels = joined(indices, "label")
    with suppress(ValueError, OverflowError):
        numbers = labels.astype(np.int64)
        if not np.char.count(labels, b"_").any():  # numpy reads 1_1 as 11
            return numbers
    return np.char.decode(labels, "utf-8")
