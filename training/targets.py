"""Builds the object that a section of the config describes: its `_target_`, called with the section's other keys."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import iter_modules
from traceback import extract_tb
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from data.errors import DataError, did_you_mean
from training.config import CONF, ConfigError, one_line


def build(name: str, section: Any, *arguments: Any, optional: dict[str, Any] | None = None, **options: Any) -> Any:
    """Calls the `_target_` of the section called `name` with `arguments`, the section's keys and `options`.

    Also passes those of `optional` that the section does not set and the target accepts. Raises a DataError or
    ConfigError of the target unchanged; ConfigError if there is no target, or if it cannot be imported or called.
    """
    if not section.get("_target_"):
        raise ConfigError(
            f"{name} has no _target_: its file in conf/{name.partition('.')[0]}/ needs the line "
            "'_target_: MODULE.NAME', with the class or function to call"
        )
    not_set = {key: value for key, value in (optional or {}).items() if key not in section}
    with _explained(name, section):
        target = _partial(section)
        return target(*arguments, **options, **accepted(target.func, not_set))


def function_of(name: str, section: Any) -> Any:
    """Returns the function that the section called `name` describes: its `_target_`, or if that is a class, an object.

    The section's other keys are keyword arguments. Raises ConfigError if the section has no `_target_`, or if that
    cannot be imported or constructed.
    """
    if not isinstance(section, dict) or "_target_" not in section:
        named = section if isinstance(section, str) else "MODULE.NAME"
        raise ConfigError(f"{name} has {section} in place of a function: write '{name}={{_target_: {named}}}'")
    with _explained(name, section):
        target = _partial(section)
        return target() if inspect.isclass(target.func) else target


@contextmanager
def _explained(name: str, section: dict[str, Any]) -> Iterator[None]:
    """Turns an error in this block into a ConfigError that names the section, its target and its keys."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:
        keys = ", ".join(f"{key}={value}" for key, value in section.items() if key != "_target_")
        raise ConfigError(f"{name}: {section['_target_']}({keys}): {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """Says why a target could not be imported or called: the error that Hydra's own ones hide, its type and place."""
    while error.__cause__ and (isinstance(error, InstantiationException) or str(error).startswith("Error loading '")):
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name:
        parent, _, missing = error.name.rpartition(".")
        if module := sys.modules.get(parent):
            known = [*vars(module), *(found.name for found in iter_modules(getattr(module, "__path__", [])))]
            return f"{parent} has no {missing}: {did_you_mean(missing, known)}".rstrip(": ")
    reason = error.msg if isinstance(error, SyntaxError) else one_line(error)
    if not reason or not isinstance(error, (InstantiationException, OSError, ValueError)):  # their messages suffice
        reason = f"{type(error).__name__}: {reason}".rstrip(": ")
    places = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    ours = [
        f"{path.relative_to(CONF.parent)} line {line}; "
        for path, line in ((Path(file), line) for file, line in places)
        if path.is_relative_to(CONF.parent) and "site-packages" not in path.parts and path != Path(__file__)
    ]
    return f"{reason} ({ours[-1] if ours else ''}HYDRA_FULL_ERROR=1 shows the traceback)"


def _partial(section: dict[str, Any]) -> Any:
    """The section's target with its keys as arguments: lists and dicts are Python's own, and not OmegaConf's."""
    return instantiate(section, _partial_=True, _convert_="all")


def accepted(function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that the function or class accepts.

    One with **kwargs, such as torchvision.models.resnet18, gets `num_classes` in addition to the named options.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function that is not written in Python may have no signature
        return options
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {key: value for key, value in options.items() if key in parameters or (takes_any and key == "num_classes")}


def target(section: dict[str, Any]) -> Any:
    """The function or class that the section's `_target_` names; None if it does not exist."""
    try:
        return getattr(_partial(section), "func", None)
    except InstantiationException:
        return None
