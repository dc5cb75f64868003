"""Reseeds the random generators that a dataset and its transforms hold, as the global ones are: before each sample.

Forked workers inherit equal generators, and would repeat each other's numbers. The generators are looked for before
each batch, because an object may replace them: in attributes, lists, tuples, dicts and functools.partial, up to DEPTH
levels deep. What is nowhere else than in a closure, a global variable or a `__slots__` object is not found.
Invariant: every generator found gets another seed, a function of the sample's key and of its place among them alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from .randomness import GOLDEN, MASK, mix, seed_globals

DEPTH = 8  # levels: a subset, its dataset, the transform, its list of parts, a part, its attribute
LONGEST = 64  # items of a list or dict of parts; longer ones have data
MOST = 1000  # objects that are looked at

Reseed = Callable[[int], None]  # gets the seed, 64 bits

SHARED = (torch.default_generator, getattr(random, "_inst", None), getattr(np.random.mtrand, "_rand", None))
PLAIN = {type(None), bool, int, float, str, bytes, set, type, torch.Tensor, np.ndarray, np.dtype, torch.dtype}
PLAIN |= {FunctionType, BuiltinFunctionType}  # types of objects that hold none


class Seeder:
    """Seeds the global generators, and those that `dataset` holds."""

    def __init__(self, dataset: Any, callables_only: bool = False) -> None:
        self._own = list(generators_in(dataset, callables_only))

    def __call__(self, key: int) -> None:
        seed_globals(key)
        for place, reseed in enumerate(self._own, 1):
            reseed(mix(key + place * GOLDEN & MASK))


def generators_in(dataset: Any, callables_only: bool = False) -> Iterator[Reseed]:
    """Yields a function for each generator that the dataset holds, which reseeds it in place.

    An object with `set_random_seed(seed)` and without generators that are found gets a call of that.
    callables_only: only generators of objects that can be called, which transforms are and streams are not.
    """
    seen: dict[int, Any] = {}  # the objects, because an id is reused
    return _walk(dataset, DEPTH, seen, not callables_only)


def _walk(value: Any, depth: int, seen: dict[int, Any], counts: bool) -> Iterator[Reseed]:
    if id(value) in seen or depth == 0 or len(seen) > MOST:
        return
    seen[id(value)] = value
    reseed = reseeder(value)
    if reseed is not None:
        if counts:
            yield reseed
        return
    is_container = isinstance(value, (list, tuple, dict))
    counts = counts or (callable(value) and not is_container)
    has_none = True
    for part in parts_of(value):
        if type(part) in PLAIN or (isinstance(part, dict) and not part):
            continue
        for reseed in _walk(part, depth - 1, seen, counts):
            has_none = False
            yield reseed
    if counts and has_none and callable(getattr(type(value), "set_random_seed", None)):
        yield lambda seed: value.set_random_seed(seed & 0xFFFFFFFF)


def parts_of(value: Any) -> Any:
    """The objects that `value` holds: the items of a container, the attributes of an object."""
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= LONGEST else ()
    if isinstance(value, (list, tuple)):
        return value if len(value) <= LONGEST else ()
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    owner = getattr(value, "__self__", None)  # of a method
    attributes = getattr(value, "__dict__", None)
    own = list(attributes.values()) if isinstance(attributes, dict) else []
    return own if owner is None else [owner, *own]


def reseeder(value: Any) -> Reseed | None:
    """Returns what reseeds `value` in place, if it is a generator of its own."""
    if any(value is shared for shared in SHARED):
        return None
    if isinstance(value, np.random.Generator):
        return partial(_reseed_numpy, value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return lambda seed: value.seed(seed & 0xFFFFFFFF)
    if isinstance(value, random.Random):
        return value.seed
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return lambda seed: value.manual_seed(seed >> 1) and None
    return None


def _reseed_numpy(bits: Any, seed: int) -> None:
    if not isinstance(bits, np.random.PCG64):
        bits.state = type(bits)(seed).state
        return
    # That of default_rng(): its state is set as numbers, because hashing a seed takes numpy ten times as long.
    state = {"state": mix(seed) << 64 | seed, "inc": seed << 64 | 1}
    bits.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
