"""Which indices make which batch: pure functions of (seed, epoch, batch number, rank).

An epoch's shuffle is a keyed permutation evaluated where it is needed, so that the first batch of a hundred
million samples costs as little as any other, a resume skips to its batch at once, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loaders.randomness import fold, mix

ROUNDS = 6
BLOCK = 4096  # samples whose indices are worked out together: numpy's calls cost more than its arithmetic


def permute(positions: np.ndarray, length: int, key: np.ndarray) -> np.ndarray:
    """The images of `positions` under a permutation of 0..length-1 chosen by `key` (uint64), as int64.

    A Feistel network (Luby and Rackoff, 1988) permutes the next even number of bits; whatever falls outside the
    range is permuted again until it falls inside ("cycle walking", Black and Rogaway, 2002), under four times on
    average.
    """
    half = np.uint64(max(3, (max(length - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [fold(key, round_number) for round_number in range(ROUNDS)]

    def feistel(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        return (left << half) | right

    out = feistel(positions.astype(np.uint64))
    while (outside := np.flatnonzero(out >= length)).size:
        out[outside] = feistel(out[outside])
    return out.astype(np.int64)


@dataclass(frozen=True)
class Order:
    """The batches of every epoch, as one rank of `world_size` sees them.

    The global batch has batch_size * world_size samples and rank r takes its r-th part. A short last global batch
    is dropped (`drop_last`) or split evenly: with `pad`, wrapping round to the epoch's first samples where it does
    not divide, so that all ranks have as many batches of as many rows; without, each sample goes to one rank.
    """

    length: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    pad: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed!r}: give an integer from 0 to 2^64 - 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank={self.rank} and world_size={self.world_size}: ranks are numbered from 0 to world_size - 1"
            )

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        full, rest = divmod(self.length, self.global_batch_size)
        start, stop = self._share(rest)
        return full + int(stop > start)

    def positions(self, number: int) -> np.ndarray:
        """Where in the epoch, as int64 from 0, the rows of this rank's batch `number` stand."""
        first = number * self.global_batch_size
        rest = self.length - first
        if rest >= self.global_batch_size:
            start, stop = self.rank * self.batch_size, (self.rank + 1) * self.batch_size
        else:
            start, stop = self._share(rest)
        return np.arange(first + start, first + stop, dtype=np.int64) % self.length

    def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The dataset indices, int64, that stand at `positions` of epoch `epoch`."""
        if not self.shuffle:
            return positions
        return permute(positions, self.length, fold(self.seed, epoch))

    def batches(self, epoch: int, first: int = 0) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The number, positions and indices of each batch of epoch `epoch`, from number `first` on."""
        block = max(1, BLOCK // self.batch_size)
        for start in range(first, len(self), block):
            numbers = range(start, min(start + block, len(self)))
            positions = [self.positions(number) for number in numbers]
            ends = np.cumsum([len(rows) for rows in positions])
            indices = self.indices(epoch, np.concatenate(positions))
            yield from zip(numbers, positions, np.split(indices, ends[:-1]), strict=True)

    def samples_before(self, number: int) -> int:
        """How many samples of the epoch all ranks together have had before batch `number`."""
        return min(number * self.global_batch_size, self.length)

    def _share(self, rest: int) -> tuple[int, int]:
        """The rows that this rank takes of a last global batch of `rest` samples."""
        if self.drop_last:
            return 0, 0
        if self.pad:
            rows = -(-rest // self.world_size)
            return self.rank * rows, (self.rank + 1) * rows
        return self.rank * rest // self.world_size, (self.rank + 1) * rest // self.world_size
