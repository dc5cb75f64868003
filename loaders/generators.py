"""Reseeds the random generators that a dataset and its transforms hold, before each sample, as the global ones are.

Forked workers inherit equal generators, and would repeat each other's numbers. The search runs before each batch,
because an object may replace its generator. It looks into attributes, lists, tuples, dicts and functools.partial, up
to DEPTH levels deep, but not into closures, global variables or `__slots__`.
Invariant: each generator gets a seed of its own, a function of the sample's key and of its number among them alone.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from .nested import attribute
from .randomness import GOLDEN, MASK, mix, seed_globals

DEPTH = 8  # levels: a subset, its dataset, the transform, its list of parts, a part, its attribute
LONGEST = 64  # items: a longer list or dict holds data, not parts
MOST = 1000  # objects that are looked at

SETTINGS = {type(None), bool, int, float, str}

Reseed = Callable[[int], object]  # gets the seed, 64 bits

SHARED = (torch.default_generator, getattr(random, "_inst", None), getattr(np.random.mtrand, "_rand", None))
PLAIN = {type(None), bool, int, float, str, bytes, set, type, torch.Tensor, np.ndarray, np.dtype, torch.dtype}
PLAIN |= {FunctionType, BuiltinFunctionType}  # objects of these types hold no generators


class Seeder:
    """Seeds the global generators, and those that `dataset` holds.

    For an object in which no generator is found, and which has `set_random_seed(seed)`, that is called.
    callables_only: only the generators of objects that can be called: of transforms, not of streams.
    """

    def __init__(self, dataset: Any, callables_only: bool = False) -> None:
        self.reseeds = list(_walk(dataset, DEPTH, {}, not callables_only))

    def __call__(self, key: int) -> None:
        seed_globals(key)
        for number, reseed in enumerate(self.reseeds, 1):
            reseed(mix(key + number * GOLDEN & MASK))


def _walk(value: Any, depth: int, seen: dict[int, Any], counts: bool) -> Iterator[Reseed]:
    """Yields a function for each generator, which reseeds it in place. `seen` keeps the objects: an id is reused."""
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
    has_generator = False
    for part in parts_of(value):
        if type(part) in PLAIN or (isinstance(part, dict) and not part):
            continue
        for reseed in _walk(part, depth - 1, seen, counts):
            has_generator = True
            yield reseed
    if counts and not has_generator and callable(getattr(type(value), "set_random_seed", None)):
        yield lambda seed: value.set_random_seed(seed & 0xFFFFFFFF)


def parts_of(value: Any) -> Any:
    """The objects that `value` holds: the items of a container, the attributes of an object."""
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= LONGEST else ()
    if isinstance(value, (list, tuple)):
        return value if len(value) <= LONGEST else ()
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    attributes = attribute(value, "__dict__")
    parts = list(attributes.values()) if isinstance(attributes, dict) else []
    owner = attribute(value, "__self__")  # if the value is a method
    if owner is not None:
        parts.insert(0, owner)
    return parts


def settings_of(value: Any) -> list[Any]:
    """Returns the numbers, texts and flags in the public attributes of `value` and of the parts that it holds."""
    settings: list[Any] = []
    seen: dict[int, Any] = {}
    level = [value]
    for _ in range(DEPTH):
        holders = level
        level = []
        for holder in holders:
            if id(holder) in seen or len(seen) > MOST:
                continue
            seen[id(holder)] = holder
            attributes = attribute(holder, "__dict__")
            parts = parts_of(holder)
            if isinstance(attributes, dict):  # private ones may be caches and open files
                parts = [part for name, part in attributes.items() if not str(name).startswith("_")]
            settings += [part for part in parts if type(part) in SETTINGS]
            level += [part for part in parts if type(part) not in PLAIN]
    return settings


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
        return lambda seed: value.manual_seed(seed >> 1)  # torch's seeds fit into an int64
    return None


def _reseed_numpy(bits: Any, seed: int) -> None:
    if not isinstance(bits, np.random.PCG64):
        bits.state = type(bits)(seed).state
        return
    # default_rng() makes this kind. Its state is set as numbers: hashing a seed takes numpy ten times as long.
    state: Any = {"state": mix(seed) << 64 | seed, "inc": seed << 64 | 1}
    bits.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
