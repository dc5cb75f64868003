"""What a run's folder may ask for: a folder from a stranger must not run code on this machine.

A config names classes and functions by `_target_`, and Hydra imports and calls whatever is named. So those of a run
must be this repository's own, or networks, optimizers, datasets and transforms of the libraries below. The test is
where an object is defined, not how it is reached: data.image_folder.os.system is refused. Before a module is
imported, its name is tested too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.utils import get_object
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from training.config import ConfigError

OWN = ("data", "models", "training.tasks")  # this repository's: classes and functions
LIBRARIES: dict[str, type] = {  # of these, only classes of that kind: their functions may load pickles
    "torch.nn": nn.Module,
    "torch.optim": Optimizer,
    "torchvision.models": nn.Module,
    "torchvision.datasets": Dataset,
    "torchvision.transforms": nn.Module,
    "timm.models": nn.Module,
    "timm.optim": Optimizer,
}
BUILDERS = ("torchvision.models._api.get_model",)  # not timm's, which is called through models/from_timm.py
PATHS = (*OWN, *LIBRARIES, "timm")  # modules that may be imported to look
UNPICKLES = "torchvision.datasets.lsun"
# Keys with which a library loads code, or another file than the checkpoint, whose pickles could run any.
# Or downloads, or gives arguments by their place, where these names do not show.
LOADS = ("trust_remote_code", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "download", "_args_")
PLAIN = (str, int, float, bool, type(None))


def check_config(
    value: Any, source: object, trusted: Sequence[str] = (), option: str = "--trust {}", key: str = ""
) -> None:
    """Checks a run's config: nested dicts and lists of plain values, with nothing left to interpolate.

    source: where the config is from, for the message; `value` is what it has at `key`. trusted: modules that the user
    trusts beside ours, and keys. option: how the user trusts another, with {} for its name. Raises ConfigError for
    what could run code, and for what else no config holds.
    """
    name, here, trust = key.rpartition(".")[2], f"{source}: {key}={value}", option.format(key)
    if _lies_in(key, trusted):
        return
    if name == "_target_":
        _check_target(value, here, trusted, option)
    elif name in LOADS and value:
        raise ConfigError(f"{here} could load code, or files that run code: if you trust it, add {trust}")
    elif isinstance(value, dict):
        for child in value:
            check_config(value[child], source, trusted, option, f"{key}.{child}".lstrip("."))
    elif isinstance(value, list | tuple):
        for child in value:
            check_config(child, source, trusted, option, key)
    elif not isinstance(value, PLAIN):
        raise ConfigError(f"{source}: {key} is a {type(value).__name__}, which no config has")
    elif isinstance(value, str) and "${" in value:
        raise ConfigError(f"{here} could read your secrets: if you trust it, add {trust}")


def check_earlier(overrides: Iterable[str], run: Path, trusted: Sequence[str]) -> None:
    """Checks the overrides that a run was started with, before Hydra reads them: only `trusted` keys may do more.

    They choose groups of conf/ by name and set keys. Those that set Hydra itself are not among them, as Hydra keeps
    them apart: they could start programs, write elsewhere, or add a folder of configs. Raises ConfigError.
    """
    for line in overrides:
        key = line.partition("=")[0].lstrip("+~")
        if _lies_in(key, trusted):
            continue
        override: Override | None = None
        with suppress(HydraException):
            override = OverridesParser.create().parse_override(line)
        value = None if override is None or override.is_delete() else override.value()
        section, _, names_key = key.partition(".")
        adds_to_logger = section == "logger" and line.startswith("+")  # an argument of wandb.init, perhaps a program's
        chosen = value if isinstance(value, list) else [value]
        names = [str(choice) for choice in chosen]  # of files in conf/, not paths to others
        is_plain = names_key or all(re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name) and ".." not in name for name in names)
        if (
            override is None
            or not re.fullmatch(r"\w+(\.\w+)*", key)  # no package, no group of Hydra's
            or section == "hydra"
            or adds_to_logger
            or not is_plain
        ):
            raise ConfigError(
                f"{run}: the run's override {line} could run code, or write elsewhere: if you trust it, add "
                f"train.trust=[{key}]"
            )
        for name in reversed(key.split(".")):
            value = {name: value}
        check_config(value, run, trusted, "train.trust=[{}]")


def check_links(run: Path, parts: str = "*", trusted: Sequence[str] = (), option: str = "--trust {}") -> None:
    """Raises ConfigError if a link would lead what is written into a run's folder, or removed, to another place.

    parts: which files and folders of it will be written to.
    """
    for part in run.glob(parts):
        for path in (part, *part.rglob("*")):
            is_inside = path.resolve().is_relative_to(run.resolve())
            if path.is_symlink() and not is_inside and part.name not in trusted:
                raise ConfigError(
                    f"{path} is a link to {path.readlink()}, where files would be written or removed: remove it, "
                    f"or if you trust it, add {option.format(part.name)}"
                )


def _check_target(target: Any, source: str, trusted: Sequence[str], option: str) -> None:
    text = str(target)
    refusal = ConfigError(
        f"{source} is not one of this repository, torch.nn, torch.optim, torchvision or timm: it could run any code; "
        f"if you trust it, add {option.format(text.rpartition('.')[0] or text)}"
    )
    if not isinstance(target, str) or not _lies_in(text, (*PATHS, *trusted)):
        raise refusal
    try:
        found = get_object(text)
    except Exception as error:
        raise ConfigError(f"{source} cannot be imported: {str(error).partition(chr(10))[0]}") from error
    module = getattr(found, "__module__", None)
    if not (inspect.isclass(found) or inspect.isfunction(found)) or not isinstance(module, str):
        raise refusal
    if not (_lies_in(module, (*OWN, *trusted)) or _is_of_library(found, module)):
        raise refusal


def _is_of_library(found: type | Callable[..., Any], module: str) -> bool:
    if inspect.isclass(found):
        kinds = [kind for room, kind in LIBRARIES.items() if _lies_in(module, [room])]
        return issubclass(found, tuple(kinds)) and module != UNPICKLES
    if f"{module}.{found.__name__}" in BUILDERS:
        return True
    if not _lies_in(module, ["torchvision.models"]):
        return False
    from torchvision.models import list_models  # here, because importing it takes a second

    return found.__name__ in list_models()


def _lies_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
