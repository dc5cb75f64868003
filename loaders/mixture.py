"""Mixture: the order of several datasets that lie one after another, and are drawn from by weights.

The epochs make one endless sequence, cut into blocks. How many samples of each part a block has is a function of its
number, and their places are shuffled by its key. A part is read in keyed permutations of its samples, one after
another. So computing the index at any position of any epoch takes the time of one block, and a part repeats a sample
only when it has given all others.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from .arguments import LoaderConfigError
from .randomness import fold, permute

BLOCK = 4096  # positions
SMALLEST = 2.0**-16  # least share of a part: a block is so long that the part has samples in it
UNIT = 1 << 62  # the sum of all weights, as integers: these are the same on every machine


@dataclass(frozen=True)
class Mixture:
    """The order of a dataset that has `lengths[0]` samples of part 0, then `lengths[1]` of part 1, and so on.

    weights: how often each part is drawn, as its share of their sum; 0: never. At the end of each block, a part has
    given its share of all samples so far, to within one sample. An epoch has as many samples as the dataset.
    Give it to a loader with a seed as its `sampler`. Raises LoaderConfigError for weights that cannot work.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(map(int, self.lengths)))
        object.__setattr__(self, "weights", tuple(map(float, self.weights)))
        parts = list(zip(self.lengths, self.weights, strict=True))
        total = math.fsum(self.weights)
        drawn = [weight for weight in self.weights if weight != 0]
        wrong = ""
        if not (0 < total < math.inf and min(drawn) >= SMALLEST * total):
            wrong = f"give each part at least {SMALLEST:.6f} of their sum, or 0"
        elif any(weight and not length for length, weight in parts):
            wrong = f"the parts have {self.lengths} samples: give the empty ones 0"
        if wrong:
            raise LoaderConfigError(f"weights={self.weights}: {wrong}")

    def __len__(self) -> int:
        return sum(self.lengths)

    def as_dict(self) -> dict[str, list[float]]:
        """Returns the mixture as a loader's state has it: plain JSON."""
        return {"lengths": list(self.lengths), "weights": list(self.weights)}

    def indices(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """Returns the dataset indices, int64 (rows,), at positions (rows,) of the endless sequence of epochs."""
        result = np.empty(len(positions), np.int64)
        numbers, places = np.divmod(positions, self._block_size)
        for number in np.unique(numbers).tolist():
            rows = numbers == number
            result[rows] = self._block(seed, number)[places[rows]]
        return result

    @property
    def _block_size(self) -> int:
        """How many positions a block has: two or more per part, so that rounding never lowers a part's count."""
        smallest = min(weight for weight in self.weights if weight) / math.fsum(self.weights)
        return max(BLOCK, 2 << math.ceil(-math.log2(smallest)))

    def _drawn_before(self, number: int) -> np.ndarray:
        """Returns how many samples each part has given before block `number`, int64 (parts,). They add up exactly."""
        total = math.fsum(self.weights)
        ends = list(accumulate(round(weight / total * UNIT) for weight in self.weights))
        first = number * self._block_size
        return np.diff([first * end // ends[-1] for end in ends], prepend=0)

    def _block(self, seed: int, number: int) -> np.ndarray:
        """Returns the dataset indices of a block."""
        size = self._block_size
        before = self._drawn_before(number)
        parts = np.repeat(np.arange(len(before)), self._drawn_before(number + 1) - before)
        parts = parts[permute(np.arange(size), size, fold(seed, number))]
        result = np.empty(size, np.int64)
        for part in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == part)
            length = self.lengths[part]
            rounds, places = np.divmod(before[part] + np.arange(len(rows)), length)
            is_one_round = rounds[0] == rounds[-1]
            key = fold(seed, part, int(rounds[0]) if is_one_round else rounds)  # a single key is faster
            result[rows] = sum(self.lengths[:part]) + permute(places, length, key)
        return result
