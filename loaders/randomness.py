"""Random numbers as a pure function of a key such as (seed, epoch, position, index).

The same key gives the same numbers in any process, thread or worker: nothing here draws from a global generator.
Keys are hashed by SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), whole
arrays of keys at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of uint64 whose every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def fold(*key: int | np.ndarray) -> np.ndarray:
    """Hashes the parts of a key, integers or integer arrays that broadcast, into uint64 of their common shape."""
    state: Any = np.uint64(len(key))
    with np.errstate(over="ignore"):  # wrapping round at 2^64 is intended; numpy warns of it for scalars only
        for part in key:
            number: Any = np.uint64(part & 0xFFFFFFFFFFFFFFFF) if isinstance(part, int) else part.astype(np.uint64)
            state = mix((state + GOLDEN) ^ mix(number + GOLDEN))
    return np.asarray(state)


class Random:
    """A stream of random numbers for each element of a key; every draw moves all the streams on.

    `Random(seed, epoch, positions, indices)` is what a dataset's `read_batch` draws from, a stream a row;
    `Random(seed, epoch, batch)` is what a batch-wise transform draws from, a single stream.
    """

    def __init__(self, *key: int | np.ndarray) -> None:
        self._parts = key
        self._drawn = 0

    @cached_property
    def key(self) -> np.ndarray:
        """uint64, hashed from the key's parts at the first draw: not everyone draws."""
        return fold(*self._parts)

    def uniform(self, k: int) -> np.ndarray:
        """Fresh float64 numbers in [0, 1), of shape (*key.shape, k): (rows, k) for a key of rows, else (k,)."""
        counters = np.arange(self._drawn + 1, self._drawn + k + 1, dtype=np.uint64)
        self._drawn += k
        bits = mix(self.key[..., None] + counters * GOLDEN)
        return (bits >> np.uint64(11)) * 2.0**-53

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator on `device`, seeded with the next draw; for a key without rows."""
        (bits,) = self.uniform(1)
        return torch.Generator(device).manual_seed(int(bits * 2**53))


def seed_globals(key: int) -> None:
    """Seeds `random`, `numpy.random` and torch's default CPU generator (about 7 us; torch.manual_seed takes 100)."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def global_states() -> tuple[Any, Any, torch.Tensor]:
    """Returns the states of the three global generators."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def restore_globals(states: tuple[Any, Any, torch.Tensor]) -> None:
    """Puts the states of the three global generators back."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


@contextmanager
def preserved_globals() -> Iterator[None]:
    """Leaves the three global generators as it found them."""
    states = global_states()
    try:
        yield
    finally:
        restore_globals(states)
