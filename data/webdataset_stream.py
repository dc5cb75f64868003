"""WebDatasetStream: data=webdataset data.streaming=true, which reads each tar file from its start to its end."""

import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from data.images.stream import CroppedStream
from data.tar_index import KINDS, opened, pair, scan, split
from data.webdataset import WebDataset, find_shards, read_classes


class WebDatasetStream(CroppedStream):
    """The training images in the shards of `urls`, or the test images in those of `test_urls`, without an index.

    Each of torch's workers reads its share of the shards, in training in random order, one after the other: from an
    object store in blocks, and so without `requests`.
    Raises DataError for a shard that is compressed or damaged, and for a key without an image or a label.
    """

    like = WebDataset

    def open(self, options: SimpleNamespace) -> Sequence[str] | None:
        key, urls = ("data.urls", options.urls) if self.train else ("data.test_urls", options.test_urls)
        self.shards, self.attempts = find_shards(key, urls), options.attempts
        self._state: dict[str, Any] = {}  # of the newest iterator
        self._loaded: dict[str, Any] = {}  # of the next one
        return options.classes and read_classes(options.classes)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator is: the order of its shards, its place in it, and the next byte there."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets where the next iterator begins."""
        self._loaded = dict(state)

    def encoded(self) -> Iterator[tuple[bytes, str, str]]:
        info = get_worker_info()
        mine = self.shards if info is None else self.shards[info.id :: info.num_workers]
        order = torch.randperm if self.train else torch.arange  # with a loaded state nothing is drawn, as before
        state = self._loaded or {"order": order(len(mine)).tolist(), "place": 0, "byte": 0}
        self._state, self._loaded = state, {}
        while state["place"] < len(mine):
            for end, data, name, label in self.read_shard(mine[state["order"][state["place"]]], state["byte"]):
                state["byte"] = end
                yield data, name, label
            state |= {"place": state["place"] + 1, "byte": 0}

    def read_shard(self, shard: str, start: int) -> Iterator[tuple[int, bytes, str, str]]:
        """Yields where each sample from byte `start` on ends, its image file, the name of that, and its label."""
        with opened(shard, attempts=self.attempts) as file:
            file.seek(start)
            for _, members in groupby(scan(file, KINDS), lambda member: split(member[0])[0]):
                sample = list(members)
                contents = {name: content for name, *_, content in sample}
                _, offset, size, _ = sample[-1]
                end = offset + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                for name, *_, label in pair(shard, sample):
                    yield end, contents[name], f"{shard}/{name}", label.decode()
