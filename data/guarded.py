"""Guarded: the base class of what users derive from. They cannot replace by mistake what it keeps in its attributes.

Invariant: a name that a base class uses is used for the same thing in a subclass.
- A method stays something that can be called, and a property stays.
- A public attribute that a constructor of ours has set keeps its kind of value, and a dict its keys.
- What a subclass has set, in its class or before `super().__init__()`, no constructor of ours overwrites (`guarded`).
Datasets, tasks and trainers derive from it. A Run has slots.
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
            of_subclass = value if hasattr(base, name) else getattr(kind, name, value)
            earlier = before.get(name, of_subclass)
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
        of_class: Any = getattr(type(self), name, None)
        is_property = isinstance(of_class, property)
        if is_property:
            fits = of_class.fset is not None
        elif callable(of_class):
            fits = callable(value)
        elif name in self._kept and name not in self._free and name[0] != "_":
            fits = may_replace(vars(self).get(name), value)
        elif name in self._refused and name not in vars(self):
            raise DataError(
                f"{type(self).__name__}.{name} is set, which nothing reads, while train.{name} is a setting: choose "
                "another name"
            )
        else:
            fits = True
        if fits:
            super().__setattr__(name, value)
            # nn.Module keeps modules and weights elsewhere, where Python does not look for a name that the class has.
            fits = is_property or getattr(self, name) is value
        if not fits:
            raise in_use(self, name, value)


def may_replace(current: Any, value: Any) -> bool:
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
