"""WebDatasetStream: data=webdataset data.streaming=true, which reads each tar file from its start to its end."""

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import torch
from torch.utils.data import get_worker_info

from data.errors import DataError
from data.images.stream import CroppedStream
from data.object_store import is_remote
from data.tar_index import IMAGES
from data.webdataset import find_shards, read_classes

Urls = str | Sequence[str] | None


class WebDatasetStream(CroppedStream):
    """The training images in the shards of `urls`, or the test images in those of `test_urls`, without an index.

    Each of torch's workers reads its share of the shards, in training in random order. The arguments are those of
    WebDataset; `requests` and `attempts` are for object stores, and not used.
    Raises DataError for a shard that is compressed or damaged, and for a key without an image or a label.
    """

    def __init__(
        self,
        train: bool,
        urls: Urls = None,
        test_urls: Urls = None,
        classes: Urls = None,
        requests: int | None = None,
        attempts: int | None = None,
        **crops: Any,
    ) -> None:
        super().__init__(train, classes and read_classes(classes), **crops)
        self.shards = find_shards("data.urls", urls) if train else find_shards("data.test_urls", test_urls)
        if remote := next(filter(is_remote, self.shards), None):
            raise DataError(f"data.streaming=true reads local files, and {remote} is none: leave out data.streaming")
        self._state: dict[str, Any] = {}  # of the newest iterator
        self._loaded: dict[str, Any] = {}  # of the next one

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator is: the order of its shards, its place in it, and the samples read there."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets where the next iterator begins."""
        self._loaded = dict(state)

    def encoded(self) -> Iterator[tuple[bytes, str, str]]:
        info = get_worker_info()
        mine = self.shards if info is None else self.shards[info.id :: info.num_workers]
        order = torch.randperm if self.train else torch.arange  # with a loaded state nothing is drawn, as before
        state = self._loaded or {"order": order(len(mine)).tolist(), "place": 0, "samples": 0}
        self._state, self._loaded = state, {}
        while state["place"] < len(mine):
            for sample in read_shard(mine[state["order"][state["place"]]], state["samples"]):
                state["samples"] += 1
                yield sample
            state |= {"place": state["place"] + 1, "samples": 0}


def read_shard(shard: str, skip: int) -> Iterator[tuple[bytes, str, str]]:
    """Yields the image file, its name and the label of each sample but the first `skip`."""
    try:
        with open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            files = filter(tarfile.TarInfo.isreg, tar)
            for key, members in islice(groupby(files, lambda member: split_name(member)[0]), skip, None):
                found = {split_name(member)[1]: member for member in members}
                image = next((found[kind] for kind in IMAGES if kind in found), None)
                label = found.get("cls") or found.get("json")
                if image is None or label is None:
                    raise tarfile.ReadError(f"the key {key} has {', '.join(found)}, and no image and label together")
                data, text = (os.pread(file.fileno(), member.size, member.offset_data) for member in (image, label))
                value = text.decode().strip() if label.name.endswith(".cls") else json.loads(text)["label"]
                yield data, f"{shard}/{image.name}", str(value)
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
                raise tarfile.ReadError(f"the header at byte {tar.offset:,} is damaged")
    except (OSError, tarfile.TarError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{shard} cannot be read as an uncompressed tar of samples: {error}; replace it") from error


def split_name(member: tarfile.TarInfo) -> tuple[str, str]:
    """The key, which ends at the first dot of the file's name, and what follows, such as jpg."""
    folder, slash, name = member.name.rpartition("/")
    stem, _, kind = name.partition(".")
    return folder + slash + stem, kind.lower()
