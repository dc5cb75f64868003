"""A stream of text: JSONL shards, which are read line by line. `python -m examples.text.lines DIR` makes some.

A line is {"tokens": [7, 93, ...], "label": 0}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from examples.text.text import Sentences


class Lines(IterableDataset[dict[str, Any]]):
    """Samples {"tokens": int64 (length,), "label": 0 or 1} of the files ROOT/train-*.jsonl, or ROOT/test-*.jsonl."""

    classes = Sentences.classes

    def __init__(self, train: bool, root: str) -> None:
        self.shards = sorted(Path(root).glob("train-*.jsonl" if train else "test-*.jsonl"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        stream = get_worker_info()  # one of loader.streams; None outside of a loader
        for shard in self.shards if stream is None else self.shards[stream.id :: stream.num_workers]:
            with shard.open() as lines:
                for line in lines:
                    sample = json.loads(line)
                    yield {"tokens": torch.tensor(sample["tokens"]), "label": sample["label"]}


def write(root: Path, shards: int = 8) -> None:
    """Writes the sentences of examples/text/text.py, in as many training shards and test shards."""
    root.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        sentences = Sentences(split == "train")
        lines = [json.dumps({**sentence, "tokens": sentence["tokens"].tolist()}) + "\n" for sentence in sentences]
        for shard in range(shards):
            (root / f"{split}-{shard:02}.jsonl").write_text("".join(lines[shard::shards]))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
