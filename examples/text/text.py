"""Text of different lengths: a dataset, its collate function, batches of similar length, and a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WORDS = 100  # tokens; 0 stands for padding


class Sentences:
    """Samples {"tokens": int64 (length,), "label": 0 or 1}: whether more tokens are above the middle than below.

    train: the training split. length: samples. shortest, longest: tokens in a sample.
    """

    classes = ("low", "high")

    def __init__(self, train: bool, length: int = 4000, shortest: int = 5, longest: int = 60) -> None:
        random = np.random.default_rng(int(train))
        self.lengths = random.integers(shortest, longest + 1, length if train else max(20, length // 4))
        self.starts = np.concatenate([[0], self.lengths.cumsum()])
        self.tokens = random.integers(1, WORDS, self.starts[-1])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[self.starts[index] : self.starts[index + 1]]
        return {"tokens": torch.from_numpy(tokens), "label": int(2 * (tokens > WORDS // 2).sum() > len(tokens))}


class Pad:
    """Makes a batch of samples: tokens int64 (B, longest), padded with 0, and labels int64 (B,)."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        tokens = nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
        return {"tokens": tokens, "label": torch.tensor([sample["label"] for sample in samples])}


class LengthBuckets:
    """A batch sampler: samples of similar length, the batches in random order, so that little is padding.

    dataset: with an array `lengths` (N,). rank, world_size: each process gets every world_size-th batch, and all get
    equally many. Without `set_epoch`, epoch 0.
    """

    def __init__(self, dataset: Any, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.lengths, self.batch_size, self.seed = lengths_of(dataset), batch_size, seed
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths) // self.batch_size // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng([self.seed, self.epoch])
        order = np.argsort(self.lengths + random.uniform(0, 5, len(self.lengths)))  # near lengths change places
        batches = order[: len(order) // self.batch_size * self.batch_size].reshape(-1, self.batch_size)
        mine = random.permutation(len(batches))[: len(self) * self.world_size][self.rank :: self.world_size]
        for number in mine:
            yield batches[number].tolist()


def lengths_of(dataset: Any) -> np.ndarray:
    """The lengths of a dataset's samples, also of a part of it (data.val_fraction), or inside a wrapper."""
    if hasattr(dataset, "indices"):
        return lengths_of(dataset.dataset)[dataset.indices]
    return dataset.lengths if hasattr(dataset, "lengths") else lengths_of(dataset.dataset)


class BagOfWords(nn.Module):
    """Takes tokens int64 (B, T); returns logits (B, num_classes): a linear map of the mean embedding."""

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, width, mode="mean", padding_idx=0)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))
