"""Searches what a loader calls (dataset, collate_fn, transforms) for random generators, and for what may change in it.

It looks first into what the objects hold: attributes, `__slots__`, containers, arguments of functools.partial,
closures, default arguments and class attributes. Then it follows code, also lambdas, static methods and properties: by
the global names in it to functions, classes, objects and the attributes of modules, through the user's own modules.
Last come the items of long containers. It evaluates no property and calls no code of the user's.
"""

import dis
import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from itertools import chain, count, cycle, islice
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

from .reseed import Reseed, is_generator, reseed_numpy, reseeder

log = logging.getLogger(__name__)

DEPTH = 8  # levels that are searched in one go; what lies deeper comes later
LONGEST = 64  # items: what a longer container holds comes last, and is compared only once an epoch
MOST = 10_000  # objects that are looked into
ITEMS = 100_000  # items of a container that are looked at
INSIDE = 1000  # items of a long container that are looked into
PLACES = 1000  # objects whose places are compared before each batch

VALUES = {type(None), bool, int, float, complex, str, bytes}
PLAIN = {*VALUES, torch.Tensor, np.ndarray, np.dtype, torch.dtype, PosixPath, WindowsPath}
PLAIN |= {*np.sctypeDict.values()}
PLAIN |= {MemberDescriptorType, GetSetDescriptorType, WrapperDescriptorType}  # objects of these types hold no others
OPAQUE = (ModuleType, FrameType, GeneratorType, CodeType, logging.Logger)  # they lead to everything
ITERATORS = {cycle, count, chain, islice, map, zip, enumerate, GeneratorType}
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
NAMING = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME", "IMPORT_FROM")
LIBRARIES = ("builtins", "torch", "torchvision", "numpy")  # their classes and functions hold none


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
        self.reseeds |= {id(bits): partial(reseed_numpy, bits) for bits in self._bits if id(bits) not in owned}

    def _visit(self, value: Any, counts: bool, depth: int = DEPTH) -> bool:
        """Returns whether a new generator was found in the value."""
        kind = type(value)
        if counts and kind in ITERATORS:
            warn_of_iterator(kind.__name__)
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
        self.holders.append(value)  # it has the slots and, since Python 3.13, the attributes themselves
        found = [self._visit(part, counts, depth - 1) for part in parts]
        for owner in kind.__mro__:
            if not is_of_library(owner):
                found += [self._visit(part, counts, depth - 1) for part in slots_of(value, owner)]
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


@cache
def warn_of_iterator(kind: str) -> None:
    worker = get_worker_info()
    if worker is None or worker.id == 0:
        log.warning(
            "a dataset, collate_fn or transform holds an iterator (%s): if reading a sample advances it, samples "
            "depend on the number of workers, and differ after a resume; compute what it gives from the index",
            kind,
        )


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
