"""Searches what a loader calls: dataset, collate_fn and transforms. Reseeds the random generators in it.

They are seeded before each sample, as the global ones are, and those of a batch's transforms before each batch. Forked
workers inherit equal generators, and would repeat each other's numbers; and a resume would begin with other states.
Invariant: each generator gets a seed of its own, a function of the sample's key and of its number among them alone.

One search finds the generators and the places in which objects are held. It looks first into what the objects hold:
attributes, `__slots__`, containers, arguments of functools.partial, closures, default arguments and class attributes.
Then it follows code, also lambdas, static methods and properties: by the global names in it to functions, classes,
objects and the attributes of modules, through the user's own modules. Last come the items of long containers.
It evaluates no property and calls no code of the user's.
All of it runs once in an epoch. Before each batch the places are compared, by identity, as an object may replace its
generator: if one holds another object, the search runs again. For `read_batch`, and for transforms of batches, which
should draw from their `random`, that is left out.
"""

import dis
import gc
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from pathlib import PosixPath, WindowsPath
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .randomness import GOLDEN, MASK, mix, seed_globals

DEPTH = 8  # levels that are searched in one go; what lies deeper comes later
LONGEST = 64  # items: what a longer container holds comes last, and is compared only once an epoch
MOST = 10_000  # objects that are looked into
ITEMS = 100_000  # items of a container that are looked at
INSIDE = 1000  # items of a long container that are looked into
PLACES = 1000  # objects whose places are compared before each batch
SPOTS = 65_536  # items: of a larger array only FEW_SPOTS are compared, spread evenly
FEW_SPOTS = 1024

log = logging.getLogger(__name__)

Reseed = Callable[[int], object]  # gets the seed, 64 bits

SHARED = (torch.default_generator, getattr(random, "_inst", None), getattr(np.random.mtrand, "_rand", None))
VALUES = {type(None), bool, int, float, complex, str, bytes}
PLAIN = {*VALUES, torch.Tensor, np.ndarray, np.dtype, torch.dtype, PosixPath, WindowsPath}
PLAIN |= {*np.sctypeDict.values()}
PLAIN |= {MemberDescriptorType, GetSetDescriptorType, WrapperDescriptorType}  # objects of these types hold no others
OPAQUE = (ModuleType, FrameType, GeneratorType, CodeType, logging.Logger)  # they lead to everything
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
NAMING = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME", "IMPORT_FROM")
LIBRARIES = ("builtins", "torch", "torchvision", "numpy")  # their classes and functions hold none


class Seeder:
    """Seeds the global generators, and those that are held by what a loader calls.

    For an object in which no generator is found, and which has `set_random_seed(seed)`, that is called.
    callables_only: only the generators of objects that can be called: of transforms, not of streams.
    """

    def __init__(self, *called: Any, callables_only: bool = False) -> None:
        self._called = called
        self._counts = not callables_only
        self._epoch: int | None = None
        self._search()

    def _search(self) -> None:
        """Searches everything."""
        held = Held(self._called, self._counts)
        near = dict(held.reseeds)
        self._near = Places(held.holders, held.names)
        names = dict(held.names)
        watched = held.follow_code()
        self._kept = [held]  # with its objects: an id is reused
        self._far = Places(watched, {name: held.names[name] for name in held.names.keys() - names.keys()})
        self._far_reseeds = {number: reseed for number, reseed in held.reseeds.items() if number not in near}
        self.reseeds = [*held.reseeds.values()]

    def update(self, epoch: int, compares: bool = True) -> None:
        """Is called before a batch. Searches again if the epoch is another one or, if it compares, for another object.

        For one in an attribute it does not follow code again, nor search long containers, as this takes longer.
        """
        if epoch != self._epoch or (compares and self._far.have_changed()):
            self._search()
        elif compares and self._near.have_changed():
            held = Held(self._called, self._counts)
            self._near = Places(held.holders, held.names)
            self._kept[1:] = [held]
            self.reseeds = [*(held.reseeds | self._far_reseeds).values()]
        self._epoch = epoch

    def __call__(self, key: int) -> None:
        seed_globals(key)
        self.seed_held(key)

    def seed_held(self, key: int | np.ndarray) -> None:
        """Seeds only the generators that are held: where another thread may draw from the global ones."""
        for number, reseed in enumerate(self.reseeds, 1):
            reseed(mix(int(key) + number * GOLDEN & MASK))


class Places:
    """Places that may get other objects: dicts, other containers, cells, objects with slots, and global variables."""

    def __init__(self, holders: list[Any], names: dict[tuple[int, str], dict[str, Any]]) -> None:
        self._holders = holders[:PLACES]
        self._variables = [(scope, name) for (_, name), scope in names.items()]
        self._ids: list[int] = []
        self._parts: list[int] = []
        self.have_changed()

    def have_changed(self) -> bool:
        """Returns whether another object is in one of them than before. Numbers, texts and arrays do not count."""
        places = gc.get_referents(*self._holders)
        places += [scope.get(name) for scope, name in self._variables]
        ids = list(map(id, places))
        if ids == self._ids:
            return False
        parts = [id(part) for part in places if type(part) not in PLAIN]
        have_changed = parts != self._parts
        self._ids = ids
        self._parts = parts
        return have_changed


class Held:
    """What some objects hold; after `follow_code()` also what their code leads to, and items of long containers.

    reseeds: by the ids of generators, in the order in which they were found, functions that reseed them in place.
    holders: dicts of attributes and of classes, containers, cells of closures: they may get other objects.
    names: global variables that may: by the id of their scope and their name, the scope.
    long: containers with more than LONGEST items.
    counts: False, if generators count only inside objects that can be called.
    """

    def __init__(self, objects: tuple[Any, ...], counts: bool = True) -> None:
        self.reseeds: dict[int, Reseed] = {}
        self.holders: list[Any] = []
        self.names: dict[tuple[int, str], dict[str, Any]] = {}
        self.long: list[Any] = []
        self._seen: dict[int, Any] = {}  # keeps the objects: an id is reused
        self._bits: list[np.random.BitGenerator] = []
        # What is visited later: what lies deep, what code leads to, and the items of long containers.
        self._deep: deque[tuple[Any, bool]] = deque()
        self._code: deque[tuple[Callable[..., object], Any, bool]] = deque()
        self._last: deque[tuple[Any, bool]] = deque()
        for value in objects:
            self._visit(value, counts)
        self._visit_deep()
        self._add_bits()

    def follow_code(self) -> list[Any]:
        """Returns the holders that it finds, but for those in long containers."""
        near = len(self.holders)
        self._visit_code()
        watched = self.holders[near:]
        while self._last:
            self._visit_items(*self._last.popleft())
            self._visit_code()
        self._add_bits()
        return watched

    def _visit_deep(self) -> None:
        while self._deep:
            self._visit(*self._deep.popleft())

    def _visit_code(self) -> None:
        while self._code or self._deep:
            self._visit_deep()
            if self._code:
                visit, value, counts = self._code.popleft()
                visit(value, counts)

    def _add_bits(self) -> None:
        """Adds the bit generators that no numpy generator has."""
        owners = [value for value in self._seen.values() if issubclass(type(value), np.random.Generator)]
        owned = {id(generator.bit_generator) for generator in owners}
        self.reseeds |= {id(bits): partial(_reseed_numpy, bits) for bits in self._bits if id(bits) not in owned}

    def _visit(self, value: Any, counts: bool, depth: int = DEPTH) -> bool:
        """Returns whether a new generator was found in the value."""
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen or len(self._seen) > MOST or issubclass(kind, OPAQUE):
            return False
        if depth == 0:
            self._deep.append((value, counts))
            return False
        if issubclass(kind, type):
            self._code.append((self._visit_named, value, counts))
            return False
        self._seen[id(value)] = value
        if issubclass(kind, np.random.BitGenerator) and counts:
            self._bits.append(value)
        if is_generator(value):
            reseed = reseeder(value) if counts else None
            if reseed is not None:
                self.reseeds[id(value)] = reseed
            return reseed is not None
        if kind is FunctionType:
            return self._visit_function(value, True, depth)
        base = next((base for base in CONTAINERS if issubclass(kind, base)), None)
        if base is None:
            return self._visit_object(value, counts or callable(value), depth)
        if base.__len__(value) > LONGEST:
            self.long.append(value)
            self._last.append((value, counts))
            return False
        self.holders.append(value)
        found = [self._visit(part, counts, depth - 1) for part in items_of(value)]
        if kind is not base:
            found.append(self._visit_object(value, counts, depth))
        return any(found)

    def _visit_items(self, value: Any, counts: bool) -> None:
        """Visits the items of a long container. Tuples and dicts that hold only plain ones are no affair of gc's."""
        parts = [part for part in items_of(value) if type(part) not in PLAIN]
        for part in [part for part in parts if type(part) not in (tuple, dict) or gc.is_tracked(part)][:INSIDE]:
            self._visit(part, counts)

    def _visit_object(self, value: Any, counts: bool, depth: int) -> bool:
        kind = type(value)
        parts = [value.__self__] if kind is MethodType else []
        if issubclass(kind, partial):
            parts = [value.func, *value.args, *value.keywords.values()]
        attributes = attributes_of(value)
        if attributes is not None:
            self._seen[id(attributes)] = attributes
            self.holders.append(attributes)
            parts += attributes.values()
        found = [self._visit(part, counts, depth - 1) for part in parts]
        for owner in kind.__mro__:
            if not is_of_library(owner):
                slots = slots_of(value, owner)
                if slots:
                    self.holders.append(value)
                found += [self._visit(part, counts, depth - 1) for part in slots]
                found.append(self._visit_class(owner, counts, depth))
        # What objects of compiled classes hold.
        self._code += [(self._visit, part, counts) for part in gc.get_referents(value) if type(part) is not type]
        has_generator = any(found)
        if counts and not has_generator and callable(getattr(kind, "set_random_seed", None)):
            self.reseeds[id(value)] = lambda seed: value.set_random_seed(seed & 0xFFFFFFFF)
            return True
        return has_generator

    def _visit_class(self, owner: type, counts: bool, depth: int) -> bool:
        if id(owner) in self._seen:
            return False
        self._seen[id(owner)] = owner
        (members,) = gc.get_referents(vars(owner))  # the dict behind the read-only view
        self.holders.append(members)
        found = []
        for name, part in list(members.items()):
            if type(part) is FunctionType:
                found.append(self._visit_function(part, counts, depth))
            elif type(part) in (staticmethod, classmethod):
                self._code.append((self._visit_named, part.__func__, counts))
            elif type(part) is property:
                self._code += [(self._visit_named, code, counts) for code in (part.fget, part.fset, part.fdel)]
            elif not name.startswith("__"):  # but for annotations and such
                found.append(self._visit(part, counts, depth - 1))
        return any(found)

    def _visit_function(self, function: FunctionType, counts: bool, depth: int) -> bool:
        if is_of_library(function):
            return False
        self._seen[id(function)] = function
        cells = function.__closure__ or ()
        self.holders += cells
        parts = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *gc.get_referents(*cells)]
        for name in function.__code__.co_names:
            part = function.__globals__.get(name)
            if is_generator(part):
                self.names[id(function.__globals__), name] = function.__globals__
                parts.append(part)
        found = [self._visit(part, counts, depth - 1) for part in parts]
        self._code.append((self._visit_names, function, counts))
        return any(found)

    def _visit_named(self, value: Any, counts: bool) -> None:
        """Visits a function or a class that code names, or what is in the place of one."""
        if issubclass(type(value), type):
            for owner in value.__mro__:
                if is_users(owner.__module__):
                    self._visit_class(owner, counts, DEPTH)
        elif type(value) is not FunctionType:
            self._visit(value, counts)
        elif id(value) not in self._seen:
            self._visit_function(value, counts, DEPTH)

    def _visit_names(self, function: FunctionType, counts: bool) -> None:
        """Visits what the code of a function names, if it is the user's."""
        scope = function.__globals__
        if not is_users(scope.get("__name__")):
            return
        if function.__dict__:
            self._visit(function.__dict__, counts)
        code = function.__code__
        names = names_in(code)
        modules: set[int] = set()
        for name in names:
            is_static = issubclass(type(scope.get(name)), (FunctionType, type, ModuleType))
            if name in scope and (is_static or name in globals_in(code)):
                self._visit_name(scope, name, names, counts, modules)
            for module in (name, f"{scope.get('__package__')}.{name}".strip(".")):
                if module in sys.modules and is_users(module) and name in globals_in(code):  # imported by the function
                    self._visit_module(sys.modules[module], names, counts, modules)

    def _visit_name(
        self, scope: dict[str, Any], name: str, names: Iterable[str], counts: bool, modules: set[int]
    ) -> None:
        value = scope[name]
        kind = type(value)
        if issubclass(kind, ModuleType):
            self._visit_module(value, names, counts, modules)
        elif issubclass(kind, (FunctionType, type)):
            self._code.append((self._visit_named, value, counts))
        elif kind not in PLAIN or value is None:
            self.names[id(scope), name] = scope
            self._visit(value, counts)

    def _visit_module(self, module: ModuleType, names: Iterable[str], counts: bool, modules: set[int]) -> None:
        """Visits the attributes of a module of the user's that have one of the names."""
        scope = attributes_of(module) or {}
        if id(module) not in modules and is_users(scope.get("__name__")):
            modules.add(id(module))
            for name in names:
                if name in scope:
                    self._visit_name(scope, name, names, counts, modules)


def is_generator(value: Any) -> bool:
    return issubclass(type(value), GENERATORS)


def items_of(value: Any) -> list[Any]:
    """The first ITEMS items of a container, or values of a dict, past any methods of a subclass."""
    base = next(base for base in CONTAINERS if issubclass(type(value), base))
    return list(islice(dict.values(value) if base is dict else base.__iter__(value), ITEMS))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The object's `__dict__`, past any `__getattr__`."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def slots_of(value: Any, owner: type) -> list[Any]:
    """What is in the `__slots__` of one of its classes."""
    slots = []
    names = vars(owner).get("__slots__", ())
    for name in (names,) if isinstance(names, str) else names:
        member = vars(owner).get(name)
        if isinstance(member, MemberDescriptorType):
            with suppress(AttributeError):  # it is empty
                slots.append(member.__get__(value))
    return slots


@cache
def names_in(code: CodeType) -> tuple[str, ...]:
    """All names in a code object and in those nested in it: global ones, attributes, imports."""
    nested = [names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *chain.from_iterable(nested)]))


@cache
def globals_in(code: CodeType) -> set[str]:
    """The names of global variables and imports alone, which takes longer."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in NAMING}
    return names.union(*(globals_in(part) for part in code.co_consts if isinstance(part, CodeType)))


@cache
def is_users(module: Any) -> bool:
    """Whether a module is the user's own: no installed package, and no part of Python or of the loaders."""
    top = str(module).partition(".")[0]
    file = (attributes_of(sys.modules.get(module)) or {}).get("__file__")
    is_installed = "-packages" in str(file) or top in sys.stdlib_module_names
    return not is_installed and top not in (*LIBRARIES, __name__.partition(".")[0])


def is_of_library(value: Any) -> bool:
    top = str(value.__module__).partition(".")[0]
    return top in LIBRARIES or (isinstance(value, type) and top in sys.stdlib_module_names)


def settings_of(value: Any) -> list[Any]:
    """Returns what an object and its parts hold, to be compared with an earlier result.

    It has numbers and texts by their values, arrays and tensors by their items, and other objects by their ids.
    """
    held = Held((value,), counts=False)
    settings: list[Any] = []
    for holder in held.holders:
        if type(holder) is dict:  # Python itself adds names such as __slotnames__ to a class
            parts = [part for name, part in list(holder.items()) if type(name) is not str or name[:2] != "__"]
        else:
            parts = gc.get_referents(holder)
        settings += map(setting_of, parts)
    for container in held.long:
        items = items_of(container)
        settings += [len(items), hash(tuple(map(id, items)))]
    return settings


def spots_of(size: int) -> np.ndarray:
    return np.linspace(0, size - 1, size if size <= SPOTS else FEW_SPOTS, dtype=np.int64)


def is_private(array: np.ndarray) -> bool:
    """Whether an array's memory belongs to no other object, such as a memory map, which workers see as it is."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is None


def setting_of(part: Any) -> Any:
    kind = type(part)
    if kind in VALUES:
        return kind, part
    if issubclass(kind, np.generic):
        return kind, part.tobytes()
    if kind is np.ndarray and is_private(part):
        return part.dtype, part.shape, part.flat[spots_of(part.size)].tobytes()
    if kind is torch.Tensor and part.device.type == "cpu":
        with suppress(RuntimeError):  # sparse, quantized, nested and others do not give their items
            if not part.is_shared():
                items = part.detach().take(torch.from_numpy(spots_of(part.numel())))
                return part.dtype, part.shape, items.view(torch.uint8).numpy().tobytes()
    return id(part)


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
