"""Reseeds the random generators that are held by what a loader calls: dataset, collate_fn and transforms.

They are seeded before each sample, as the global ones are, and those of a batch's transforms before each batch. Forked
workers inherit equal generators, and would repeat each other's numbers; and a resume would begin with other states.
The search runs before each batch, because an object may replace its generator. For `read_batch`, and for transforms of
batches, which should draw from their `random`, it runs once, or before each epoch. It looks into attributes, those of
classes and `__slots__` too, lists, tuples, dicts, functools.partial, and a function's closure, default arguments and
global variables that are generators, up to DEPTH levels deep.
Invariant: each generator gets a seed of its own, a function of the sample's key and of its number among them alone.
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .nested import attribute
from .randomness import GOLDEN, MASK, mix, seed_globals

DEPTH = 8  # levels: a subset, its dataset, the transform, its list of parts, a part, its attribute
LONGEST = 64  # items: a longer list or dict holds data, not parts
MOST = 1000  # objects that are looked at
SETTINGS = {type(None), bool, int, float, str}

log = logging.getLogger(__name__)

Reseed = Callable[[int], object]  # gets the seed, 64 bits

SHARED = (torch.default_generator, getattr(random, "_inst", None), getattr(np.random.mtrand, "_rand", None))
PLAIN = {type(None), bool, int, float, str, bytes, set, type, torch.Tensor, np.ndarray, np.dtype, torch.dtype}
PLAIN |= {BuiltinFunctionType, property, staticmethod, classmethod}  # objects of these types hold no generators
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
LIBRARIES = ("builtins", "torch", "torchvision", "numpy")  # their classes and functions hold none


class Seeder:
    """Seeds the global generators, and those that are held by what a loader calls.

    For an object in which no generator is found, and which has `set_random_seed(seed)`, that is called.
    callables_only: only the generators of objects that can be called: of transforms, not of streams.
    """

    def __init__(self, *called: Any, callables_only: bool = False) -> None:
        seen: dict[int, Any] = {}
        self.reseeds = [reseed for part in called for reseed in _walk(part, DEPTH, seen, not callables_only)]

    def __call__(self, key: int) -> None:
        seed_globals(key)
        self.seed_held(key)

    def seed_held(self, key: int | np.ndarray) -> None:
        """Seeds only the generators that are held: where another thread may draw from the global ones."""
        for number, reseed in enumerate(self.reseeds, 1):
            reseed(mix(int(key) + number * GOLDEN & MASK))


def _walk(value: Any, depth: int, seen: dict[int, Any], counts: bool) -> Iterator[Reseed]:
    """Yields a function for each generator, which reseeds it in place. `seen` keeps the objects: an id is reused."""
    if id(value) in seen or depth == 0 or len(seen) > MOST:
        return
    seen[id(value)] = value
    if isinstance(value, GENERATORS):
        reseed = reseeder(value)
        if reseed is not None and counts:
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
    if isinstance(value, FunctionType):
        return parts_of_function(value)
    attributes = attribute(value, "__dict__")
    parts = list(attributes.values()) if isinstance(attributes, dict) else []
    owner = attribute(value, "__self__")  # if the value is a method
    if owner is not None:
        parts.insert(0, owner)
    for kind in type(value).__mro__:
        if not is_of_library(kind):
            parts += [attribute(value, name) for name in vars(kind).get("__slots__", ())]
            for part in list(vars(kind).values()):
                parts += parts_of_function(part) if isinstance(part, FunctionType) else [part]
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


def parts_of_function(function: FunctionType) -> list[Any]:
    """The objects that a function holds; of its module's global variables the generators alone."""
    if is_of_library(function):
        return []
    parts = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            parts.append(cell.cell_contents)
    names = map(function.__globals__.get, function.__code__.co_names)
    return parts + [part for part in names if isinstance(part, GENERATORS)]


def is_of_library(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in LIBRARIES


@cache
def warn_of(kind: str) -> None:
    log.warning(
        "a dataset, collate_fn or transform holds a %s, which the loader cannot seed: it differs from run to run and "
        "after a resume; draw from the global generators of Python, numpy or torch, or from the `random` that "
        "read_batch and a batch's transform get",
        kind,
    )


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
        return partial(_reseed_numpy, value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return lambda seed: value.seed(seed & 0xFFFFFFFF)
    if isinstance(value, random.Random):
        return value.seed
    return lambda seed: value.manual_seed(seed >> 1)  # torch's seeds fit into an int64


def _reseed_numpy(bits: Any, seed: int) -> None:
    if not isinstance(bits, np.random.PCG64):
        bits.state = type(bits)(seed).state
        return
    # default_rng() makes this kind. Its state is set as numbers: hashing a seed takes numpy ten times as long.
    state: Any = {"state": mix(seed) << 64 | seed, "inc": seed << 64 | 1}
    bits.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
