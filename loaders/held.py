"""Finds what the objects that a loader calls (dataset, collate_fn, transforms) hold.

The words are those of README.md, "Order, randomness, state", and CONTRACT.md:

| what is looked for                               | by               | what becomes of it                            |
|--------------------------------------------------|------------------|-----------------------------------------------|
| generators that the dataset, its transforms and  | Held             | generators.Seeder seeds them; one that cannot |
| collate_fn hold, and a Preloader's transforms    |                  | be seeded is logged once                      |
| iterators that these hold                        | Held             | logged once: no state has where they are      |
| another object in one of their places            | Held.has_changed | Seeder searches again                         |
| a value, an item of an array or a tensor, or an  | contents_of      | SeededLoader restarts persistent workers when |
| object in dataset or collate_fn that has changed |                  | the next epoch begins                         |
| a sampler's generator, or a change in it: in its | samplers.py, by  | the loader has no state; the change is logged |
| own attributes alone                             | content_of       | once                                          |
| tensors in a batch                               | nested.py alone  | moved, copied and counted                     |

One walk along references, as Python's garbage collector knows them (gc.get_referents): from an object to its
attributes, slots and class, from a container to its items, from a method to its object. So it evaluates no property
and calls no code of the user's. Three kinds of objects are not walked like that:
- A function refers to all global variables of its module. It counts with its closure, default arguments and
  attributes, and in the end with the variables that its code names: in the user's own modules.
- Classes and functions of Python, torch and numpy are left out, and objects that lead to everything (OPAQUE).
- The items of a long container come last, and so do the results that a cache has kept.

Shared memory is compared too. Changes outside the objects are not seen: in the process of a multiprocessing.Manager,
in a semaphore (the flag of an Event), or in a file. So an array on read-only memory of another object, which may be a
file, is compared by identity alone.
"""

import ctypes
import gc
import logging
import sys
from abc import ABC
from collections import deque
from contextlib import suppress
from functools import cache
from itertools import chain, count, cycle, islice
from mmap import mmap
from operator import is_
from pathlib import PosixPath, WindowsPath
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import ref

import numpy as np
import torch

from .randomness import GENERATORS, is_generator

LONGEST = 64  # items: a container that has more is a long one, and is compared only once an epoch
MOST = 10_000  # objects that are looked into
ITEMS = 100_000  # items of a container that are looked at
INSIDE = 1000  # items of a long container that are looked into
WATCHED = 1000  # objects that are compared before each batch
SPOTS = 65_536  # items: of a larger array only FEW_SPOTS are compared, spread evenly
FEW_SPOTS = 1024

VALUES = {type(None), bool, int, float, complex, str, bytes}
PLAIN = {*VALUES, torch.Tensor, np.ndarray, np.dtype, torch.dtype, PosixPath, WindowsPath}
PLAIN |= {*np.sctypeDict.values()}
PLAIN |= {MemberDescriptorType, GetSetDescriptorType, WrapperDescriptorType}  # objects of these types hold no others
OPAQUE = (ModuleType, FrameType, GeneratorType, CodeType, logging.Logger, type(vars(ABC)["_abc_impl"]))
CACHE = type(cache(len))
ITERATORS = {cycle, count, chain, islice, map, zip, enumerate, GeneratorType}
BUFFERS = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union, mmap, memoryview)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
LIBRARIES = {*sys.stdlib_module_names, "torch", "torchvision", "numpy"}


class Held:
    """What some objects hold; after `follow_code()` also what their code names, and items of long containers.

    generators: by their ids, in the order in which they were found; numpy's as their bit generators.
    holders: the objects, containers, classes and cells of closures that were found: they may get other objects.
    iterators: the names of the types of iterators, which reading a sample may advance.
    long: containers with more than LONGEST items.
    callables_only: generators count only inside objects that can be called.
    """

    def __init__(self, objects: tuple[Any, ...], callables_only: bool = False) -> None:
        self.generators: dict[int, Any] = {}
        self.iterators: set[str] = set()
        self.holders: list[Any] = []
        self.long: list[Any] = []
        self._seen: dict[int, Any] = {}  # keeps the objects: an id is reused
        self._functions: deque[FunctionType] = deque()  # whose code was not followed yet
        self._last: deque[tuple[Any, bool]] = deque()  # what comes last, and whether generators count in it
        self._variables: dict[tuple[int, str], dict[str, Any]] = {}  # the scope, by its id and the variable's name
        self._caches: list[Any] = []  # of functools.cache and lru_cache
        self._watched: list[Any] = []
        self._ids: list[int] = []
        self._parts: list[int] = []
        for value in objects:
            self._walk(value, counts=not callables_only)

    def follow_code(self) -> None:
        """Goes on where the code of the functions leads, and last to the items of long containers."""
        self._follow_functions()
        self._watched = [attributes_of(holder) for holder in self.holders[:WATCHED]]
        while self._last:
            self._walk(*self._last.popleft())
            self._follow_functions()
        self.has_changed()

    def has_changed(self) -> bool:
        """Returns whether a holder, or a variable, refers to another object than at the last call.

        A module that was imported since then counts too, as code may name it, and so does what a cache keeps since.
        Numbers, texts and arrays do not count, nor what is in long containers and long caches.
        """
        places = gc.get_referents(*self._watched)
        places += [scope.get(name) for (_, name), scope in self._variables.items()]
        sizes = [len(sys.modules), *(min(cache.cache_info().currsize, LONGEST) for cache in self._caches)]
        ids = [*sizes, *map(id, places)]
        if ids == self._ids:
            return False
        parts = [*sizes, *(id(part) for part in places if type(part) not in PLAIN)]
        has_changed = parts != self._parts
        self._ids = ids
        self._parts = parts
        return has_changed

    def _follow_functions(self) -> None:
        while self._functions:
            for scope, name in variables_of(self._functions.popleft()):
                value = scope[name]
                is_fixed = type(value) in PLAIN or issubclass(type(value), (FunctionType, type))
                if value is None or not is_fixed:
                    self._variables[id(scope), name] = scope
                self._walk(value, True)

    def _walk(self, start: Any, counts: bool) -> None:
        found = [(start, counts)]  # what was found last is looked into first
        while found:
            value, counts = found.pop()
            kind = type(value)
            if counts and kind in ITERATORS:
                self.iterators.add(kind.__name__)
            if kind in PLAIN or id(value) in self._seen or len(self._seen) > MOST or is_left_out(value):
                continue
            self._seen[id(value)] = value
            counts = counts or (callable(value) and not is_class(value))
            if issubclass(kind, GENERATORS):
                if counts and is_generator(value):
                    generator = value.bit_generator if issubclass(kind, np.random.Generator) else value
                    self.generators[id(generator)] = generator
                continue
            parts = referents_of(value)
            if kind is FunctionType:
                self._functions.append(value)
            elif kind is CACHE:
                self._caches.append(value)
                self._last.append((parts, counts))
                continue
            elif is_long(value):
                self.long.append(value)
                self._last += [(part, counts) for part in parts]
                continue
            else:
                self.holders.append(value)
            found += [(part, counts) for part in reversed(parts)]


def generators_of(*objects: Any) -> list[Any]:
    """Returns the random generators that the objects hold, also in closures and in what their code names."""
    held = Held(objects)
    held.follow_code()
    return list(held.generators.values())


def contents_of(value: Any) -> list[Any]:
    """Returns what an object and its parts hold, to be compared with an earlier result.

    It has numbers and texts by their values, arrays and CPU tensors by their items (FEW_SPOTS of those with more than
    SPOTS, and by identity), and other objects, and the items of a long container, by identity.
    """
    held = Held((value,))
    contents: list[Any] = []
    for holder in held.holders:
        contents += map(content_of, referents_of(holder))
    for container in held.long:
        items = items_of(container)
        contents.append(Same(items))
    return contents


class Same:
    """Is equal for the same objects alone. Their ids would not do, as that of an object that is gone is given again.

    It keeps no object that can have a weak reference: the same object has the same one, and another one another.
    """

    def __init__(self, parts: list[Any]) -> None:
        self._parts = [ref(part) if type(part).__weakrefoffset__ else part for part in parts]

    def __eq__(self, other: object) -> bool:
        if type(other) is not Same or len(self._parts) != len(other._parts):
            return False
        return all(map(is_, self._parts, other._parts))

    __hash__ = None  # type: ignore[assignment]


def content_of(part: Any) -> Any:
    kind = type(part)
    if kind in VALUES:
        return kind, part
    if issubclass(kind, np.generic):
        return kind, part.tobytes()
    if kind in (torch.Tensor, torch.nn.Parameter) and part.device.type == "cpu":
        with suppress(RuntimeError):  # sparse, quantized, nested and others do not give their items
            items = part.detach().take(torch.from_numpy(spots_of(part.numel())))
            return part.dtype, part.shape, items.view(torch.uint8).numpy().tobytes(), same_if_large(part, part.numel())
    if issubclass(kind, (np.ndarray, *BUFFERS)):
        with suppress(ValueError):  # a closed map, or gaps in a memoryview
            array = np.asarray(part) if issubclass(kind, np.ndarray) else np.frombuffer(part, np.uint8)
            if can_change(array):
                content = array.flat[spots_of(array.size)].tobytes()
                return array.dtype, array.shape, content, same_if_large(part, array.size)
    return id(part) if isinstance(part, CONTAINERS) else Same([part])  # of a container, its parts are compared too


def same_if_large(array: Any, size: int) -> Same | None:
    """What of an array is compared besides some of its items: which object it is."""
    return Same([array]) if size > SPOTS else None


def spots_of(size: int) -> np.ndarray:
    return np.linspace(0, size - 1, size if size <= SPOTS else FEW_SPOTS, dtype=np.int64)


def can_change(owner: Any) -> bool:
    """Whether an array's memory is its own, or can be written to. Else it may be a file, which would be read."""
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner.base is None or owner.flags.writeable


def is_class(value: Any) -> bool:
    return issubclass(type(value), type)


def attributes_of(holder: Any) -> Any:
    """The dict of a class; other objects as they are."""
    return gc.get_referents(vars(holder))[0] if is_class(holder) else holder


def is_left_out(value: Any) -> bool:
    if issubclass(type(value), (FunctionType, type)):
        return is_of_library(str(value.__module__))
    return issubclass(type(value), OPAQUE)


def is_long(value: Any) -> bool:
    """Whether it is a container with more than LONGEST items, past any methods of a subclass."""
    kind = type(value)
    return issubclass(kind, CONTAINERS) and base_of(kind).__len__(value) > LONGEST


def base_of(kind: type) -> Any:
    """The built-in class of a container."""
    return next(base for base in CONTAINERS if issubclass(kind, base))


def items_of(value: Any) -> list[Any]:
    """The first ITEMS items of a container, or values of a dict, past any methods of a subclass."""
    base = base_of(type(value))
    return list(islice(dict.values(value) if base is dict else base.__iter__(value), ITEMS))


def referents_of(value: Any) -> list[Any]:
    """What an object refers to, as far as it is looked into.

    Of a class, names that begin with __ are left out, except functions. Of a long container, it is the first INSIDE
    items that may hold others.
    """
    if type(value) is FunctionType:
        return [value.__defaults__, value.__kwdefaults__, vars(value) or None, *(value.__closure__ or ())]
    if is_class(value):
        members = list(vars(value).items())
        return [part for name, part in members if type(part) is FunctionType or name[:2] != "__"] + [*value.__bases__]
    if is_long(value):  # garbage collection does not track tuples and dicts that hold only plain objects
        items = [part for part in items_of(value) if type(part) not in PLAIN]
        return [part for part in items if type(part) not in (tuple, dict) or gc.is_tracked(part)][:INSIDE]
    if type(value).__dictoffset__:
        with suppress(AttributeError):
            object.__getattribute__(value, "__dict__")  # else Python makes it later, which would look like a change
    return gc.get_referents(value)


def variables_of(function: FunctionType) -> list[tuple[dict[str, Any], str]]:
    """The global variables that a user's function may name: pairs of a module's namespace and a name in it.

    Each name in the code is looked up in the function's own module, and in each of the user's modules that a name
    leads to, also by an import inside the function. So `helpers.generator` leads to the variable `generator` of
    `helpers`.
    """
    scopes = [function.__globals__]
    if not is_users(scopes[0]):
        return []
    names = names_in(function.__code__)
    package = scopes[0].get("__package__")
    variables = []
    for scope in scopes:  # which grows
        for name in names:
            value = scope[name] if name in scope else sys.modules.get(name, sys.modules.get(f"{package}.{name}"))
            if issubclass(type(value), ModuleType):
                inner = object.__getattribute__(value, "__dict__")  # a module may load others in `__getattr__`
                if is_users(inner) and all(inner is not other for other in scopes):
                    scopes.append(inner)
            elif name in scope:
                variables.append((scope, name))
    return variables


@cache
def names_in(code: CodeType) -> tuple[str, ...]:
    """All names in a code object and in those nested in it: global ones, attributes, imports."""
    nested = [names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *chain.from_iterable(nested)]))


def is_users(scope: dict[str, Any]) -> bool:
    """Whether a module is the user's own: no installed package, and no part of Python or of the loaders."""
    name = str(scope.get("__name__"))
    is_ours = f"{name}.".startswith(f"{__package__}.")
    return not (is_ours or is_of_library(name) or "-packages" in str(scope.get("__file__")))


def is_of_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES
