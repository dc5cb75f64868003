"""Methods that only some loaders of a class have, and what a loader tells libraries that look into it."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NoReturn


class OptionalMethods:
    """Base of methods that only some instances of a loader's class have.

    Libraries call `set_epoch` and `state_dict` wherever they find them, so a loader that cannot support them must not
    have them. Libraries look in the class as well as in the instance, as typing's runtime protocols do. So an instance
    with the methods gets another class of the same name, derived from its own class and from this one.
    """

    @classmethod
    def give(cls, loader: Any, has_them: bool) -> None:
        """Gives the methods to the loader, or takes them away."""
        kind: Any = type(loader)
        methods: Any = cls  # mypy does not see that a class is hashable
        if has_them and not issubclass(kind, cls):
            loader.__class__ = _with_methods(kind, methods)
        elif not has_them and issubclass(kind, cls):  # somebody called type(a_loader_with_the_methods)(...)
            loader.__class__ = kind.__bases__[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The state comes last, as it may refer to the loader: by a collate_fn that is one of its methods, for example.
        return _new, type(self).__bases__, getattr(self, "__getstate__", lambda: vars(self))()


def keep_out_of_compilation() -> None:
    """Makes torch.compile leave this package's code as it is, as it leaves torch's own loader.

    It is called where a program may come from a function that torch.compile compiles: torch has no public setting for
    a whole package, and torch.compiler.disable would import the compiler for everybody, which takes seconds.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None and compiler not in _told:
        _told.append(compiler)
        compiler.trace_rules.add(__package__)


_told: list[Any] = []


class Closeable:
    """A loader that `with` closes."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Any) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def raise_missing(loader: Any, name: str) -> NoReturn:
    """Raises AttributeError, for a loader's `__getattr__`: it says why the loader lacks an optional method."""
    if name not in ("set_epoch", "state_dict", "load_state_dict"):
        object.__getattribute__(loader, name)  # raises Python's own, or again what a property has raised
    raise AttributeError(
        f"{type(loader).__name__!r} object has no attribute {name!r}: it needs a loader with a seed: without one, "
        "torch chooses the order, which cannot be resumed",
        name=name,
        obj=loader,
    )


@cache
def _with_methods(kind: Any, methods: Any) -> type:
    return type(kind.__name__, (kind, methods), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _new(kind: type, methods: type) -> Any:
    return object.__new__(_with_methods(kind, methods))
