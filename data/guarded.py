"""Guarded: the base class of what users derive from. They cannot replace by mistake what it keeps in its attributes.

Invariant: what a subclass has set before `super().__init__()`, or in its class, is not overwritten without a word.
Later a method stays a method, and a public attribute that a constructor of ours has set keeps its kind of value, and
a dict its keys. Datasets, tasks and trainers derive from it. A Run has slots.
"""

from collections.abc import Callable, Set
from functools import wraps
from inspect import signature
from numbers import Real
from os import PathLike
from typing import Any, ParamSpec

import numpy as np

from data import OPTIONAL
from data.errors import DataError

P = ParamSpec("P")

KINDS = (Real, (str, PathLike), (list, tuple, np.ndarray))  # of values that may replace one another


def guarded(init: Callable[P, None]) -> Callable[P, None]:
    """Decorates a constructor of ours: it raises DataError if it has overwritten an attribute of a subclass.

    One that is also its argument of this name may be overwritten, and so may one with an equal value.
    """

    @wraps(init)
    def construct(self: Any, *arguments: Any, **options: Any) -> None:
        kind = type(self)
        base = next(each for each in kind.__mro__ if vars(each).get("__init__") is construct)
        before = vars(self).copy()
        init(self, *arguments, **options)
        given = signature(init).bind(self, *arguments, **options).arguments | options
        for name, value in vars(self).items():
            of_class = value if hasattr(base, name) else getattr(kind, name, value)
            earlier = before.get(name, of_class)
            is_lost = earlier is not value and earlier is not given.get(name, value)
            if is_lost and not np.array_equal(earlier, value):
                raise in_use(self, name, earlier)
        self._kept = frozenset(vars(self).keys() - before.keys())

    return construct  # type: ignore[return-value]


class Guarded:
    _kept: Set[str] = frozenset()  # the attributes that a constructor of ours has set
    _free: Set[str] = OPTIONAL.keys()  # those of them that may be set to anything
    _refused: Set[str] = frozenset()  # what may not be added, as it would have no effect

    def __setattr__(self, name: str, value: Any) -> None:
        kinds = (kind for kind in type(self).__mro__ if name in vars(kind) and issubclass(kind, Guarded))
        of_class = vars(next(kinds, Guarded)).get(name)
        is_method = callable(of_class) and not callable(value)
        is_property = isinstance(of_class, property) and of_class.fset is None
        is_kept = name in self._kept and name[0] != "_" and name not in self._free
        is_changed = is_kept and not are_alike(vars(self).get(name), value)
        is_refused = name in self._refused and name not in vars(self)
        if is_method or is_property or is_changed or is_refused:
            raise in_use(self, name, value)
        super().__setattr__(name, value)
        is_elsewhere = name not in vars(self)  # as a module or a weight, which Python does not find behind a class's
        if is_elsewhere and of_class is not None and not isinstance(of_class, property):
            raise in_use(self, name, value)


def are_alike(current: Any, value: Any) -> bool:
    if isinstance(current, dict):
        return isinstance(value, dict) and current.keys() <= value.keys()
    kind = next((kind for kind in KINDS if isinstance(current, kind)), type(current))
    return current is None or isinstance(value, kind)


def in_use(owner: object, name: str, value: object) -> DataError:
    kind = type(owner).__name__
    return DataError(
        f"{kind} has set self.{name} to a {type(value).__name__}, but a base class of it uses this name: pass it on "
        "to super().__init__() if it is one of its settings, else choose another name"
    )
