"""Reseeds random generators in place: numpy's, Python's and torch's. One that cannot be seeded is named once."""

import logging
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .randomness import mix

log = logging.getLogger(__name__)

Reseed = Callable[[int], object]  # gets the seed, 64 bits

SHARED = (torch.default_generator, getattr(random, "_inst", None), getattr(np.random.mtrand, "_rand", None))
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


def is_generator(value: Any) -> bool:
    return issubclass(type(value), GENERATORS)


def reseeder(value: Any) -> Reseed | None:
    """Returns what reseeds a generator in place. Warns, once, of one that cannot be seeded."""
    if any(value is shared for shared in SHARED):
        return None
    if isinstance(value, torch.Generator) and value.device.type != "cpu" and get_worker_info() is not None:
        warn_of(f"torch.Generator on {value.device}")  # a forked process must not touch the device
        return None
    if isinstance(value, random.SystemRandom):
        warn_of("random.SystemRandom")
        return None
    if isinstance(value, np.random.Generator):
        return partial(reseed_numpy, value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return lambda seed: value.seed(seed & 0xFFFFFFFF)
    if isinstance(value, random.Random):
        return value.seed
    return lambda seed: value.manual_seed(seed >> 1)  # torch's seeds fit into an int64


@cache
def warn_of(kind: str) -> None:
    log.warning(
        "a dataset, collate_fn or transform holds a %s, which the loader cannot seed: it differs from run to run and "
        "after a resume; draw from the global generators of Python, numpy or torch, or from the `random` that "
        "read_batch and a batch's transform get",
        kind,
    )


def reseed_numpy(bits: Any, seed: int) -> None:
    if not isinstance(bits, np.random.PCG64):
        bits.state = type(bits)(seed).state
        return
    # default_rng() makes this kind. Its state is set as numbers: hashing a seed takes numpy ten times as long.
    state: Any = {"state": mix(seed) << 64 | seed, "inc": seed << 64 | 1}
    bits.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
