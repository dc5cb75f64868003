"""Which indices make which batch: pure functions of (seed, epoch, batch number, rank).

An epoch's shuffle is a keyed permutation that is computed a batch at a time. So the first batch of a hundred million
samples costs as little as any other, a resumed epoch starts at its batch at once, and no permutation is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .arguments import checked_seed
from .randomness import fold, mix

ROUNDS = 6  # of the Feistel network
BLOCK = 4096  # samples whose indices are computed together, because a numpy call costs more than its arithmetic


def permute(positions: np.ndarray, length: int, key: np.ndarray) -> np.ndarray:
    """Returns `positions`, mapped by the permutation of 0..length-1 that `key` (uint64) selects, as int64.

    A Feistel network (Luby and Rackoff, 1988) permutes all integers of an even number of bits, the smallest that can
    hold length - 1. A result outside the range is permuted again until it is inside ("cycle walking", Black and
    Rogaway, 2002), less than four times on average.
    """
    half = np.uint64(max(3, ((length - 1).bit_length() + 1) // 2))
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
    """The batches of every epoch, for one rank of `world_size`.

    The global batch has batch_size * world_size samples, and rank r takes its r-th part. A short last global batch is
    dropped (`drop_last`) or split among the ranks. If it does not divide evenly, `pad` fills it up with the epoch's
    first samples, so that all ranks get the same number of batches and rows; without `pad`, each sample goes to
    exactly one rank.

    With `rollover` (an idea from Gluon) the samples left over at the end of an epoch begin the next epoch's first
    batch: the epochs are joined into one endless sequence, which is cut into global batches, and a batch belongs to
    the epoch in which it ends. So every batch is full, and one epoch may have one batch more than another.

    Raises ValueError for a seed or a rank out of range.
    """

    length: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    pad: bool = True
    rollover: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked_seed(self.seed))
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank={self.rank} and world_size={self.world_size}: ranks are numbered from 0 to world_size - 1"
            )

    @property
    def kind(self) -> str:
        """What decides the order; part of a loader's state."""
        kind = "shuffled" if self.shuffle else "sequential"
        return f"{kind}, last_batch=rollover" if self.rollover else kind

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Batches per epoch. Raises TypeError with `rollover`, where epochs differ: see `batches_in`."""
        if self.rollover:
            raise TypeError("with last_batch='rollover' the number of batches depends on the epoch")
        full, rest = divmod(self.length, self.global_batch_size)
        start, stop = self._share(rest)
        return full + int(stop > start)

    def batches_in(self, epoch: int) -> int:
        """Returns the number of batches of an epoch; with `rollover`, 0 if it is too short to fill one."""
        return (self.carried(epoch) + self.length) // self.global_batch_size if self.rollover else len(self)

    @property
    def has_batches(self) -> bool:
        """Whether any epoch has a batch."""
        return self.length > 0 if self.rollover else len(self) > 0

    def carried(self, epoch: int) -> int:
        """Returns how many samples of earlier epochs an epoch begins with: 0 without `rollover`."""
        return epoch * self.length % self.global_batch_size if self.rollover else 0

    def positions(self, number: int, epoch: int = 0) -> np.ndarray:
        """Returns the positions in the epoch, int64, of the rows of this rank's batch `number`.

        Positions count from 0. With `rollover`, negative ones are in earlier epochs: -1 is the last position of the
        epoch before. Without it, a batch has the same positions in all epochs.
        """
        first = number * self.global_batch_size - self.carried(epoch)
        rest = self.length - first
        if rest >= self.global_batch_size:
            first += self.rank * self.batch_size
            return np.arange(first, first + self.batch_size, dtype=np.int64)
        start, stop = self._share(rest)
        return np.arange(first + start, first + stop, dtype=np.int64) % self.length

    def origins(self, epoch: int, positions: np.ndarray) -> tuple[int | np.ndarray, np.ndarray]:
        """Returns the epochs that rows come from, and their positions there; just `epoch` if all rows come from it.

        Random numbers are keyed by these, so that they do not depend on which epoch's batch delivers the row.
        """
        if not self.rollover or not len(positions) or positions[0] >= 0:  # positions ascend
            return epoch, positions
        offsets, positions = np.divmod(positions, self.length)
        return epoch + offsets, positions

    def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Returns the dataset indices, int64, at `positions` of epoch `epoch`."""
        epochs, positions = self.origins(epoch, positions)
        if not self.shuffle:
            return positions
        if not isinstance(epochs, np.ndarray):
            return permute(positions, self.length, fold(self.seed, epochs))
        indices = np.empty_like(positions)
        for one in set(epochs.tolist()):  # not np.unique, whose first call imports numpy.ma: a wait of 30 ms
            rows = epochs == one
            indices[rows] = permute(positions[rows], self.length, fold(self.seed, one))
        return indices

    def batches(self, epoch: int, first: int = 0) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields the number, positions and indices of each batch of epoch `epoch`, from number `first` on."""
        batches = EpochBatches(self, epoch)
        for number in range(first, len(batches)):
            yield number, *batches[number]

    def samples_before(self, number: int) -> int:
        """Returns how many samples an epoch's batches before batch `number` have, those of all ranks together.

        With `rollover`, samples carried over from earlier epochs count too: they are rows of the first batch.
        """
        return min(number * self.global_batch_size, self.length)

    def _share(self, rest: int) -> tuple[int, int]:
        """Returns the range of rows that this rank gets from a short last global batch of `rest` samples."""
        if self.drop_last:
            return 0, 0
        if self.pad:
            rows = -(-rest // self.world_size)
            return self.rank * rows, (self.rank + 1) * rows
        return self.rank * rest // self.world_size, (self.rank + 1) * rest // self.world_size


class EpochBatches:
    """The batches of an epoch: `batches[number]` is (positions, indices), both int64 (rows,)."""

    def __init__(self, order: Order, epoch: int) -> None:
        self._order, self._epoch = order, epoch
        self._length = order.batches_in(epoch)
        self._block: tuple[int, list[tuple[np.ndarray, np.ndarray]]] = (0, [])  # computed together, from a number on

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        first, batches = self._block
        if not 0 <= number - first < len(batches):
            stop = min(number + max(1, BLOCK // self._order.batch_size), self._length)
            positions = [self._order.positions(one, self._epoch) for one in range(number, stop)]
            ends = np.cumsum([len(rows) for rows in positions])
            indices = self._order.indices(self._epoch, np.concatenate(positions))
            first, batches = number, list(zip(positions, np.split(indices, ends[:-1]), strict=True))
            self._block = first, batches
        return batches[number - first]
