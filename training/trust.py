"""Checks a run's folder before it is used: a folder from a stranger must not run code on this machine.

A config names classes and functions by `_target_`, and Hydra imports and calls whatever is named. So the targets of a
run must be defined in this repository's data/, models/ or training/tasks.py, or be networks, losses, optimizers,
datasets or transforms of the libraries below. What counts is where an object is defined, not the path to it:
data.image_folder.os.system is refused. A module is imported only if its name belongs to these packages. The rest of
training/ does not count: it has functions that write files and start processes.
"""

from __future__ import annotations

import inspect
import logging
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

from training.config import Config, ConfigError, one_line

log = logging.getLogger(__name__)

OWN = ("data", "models", "training.tasks")  # all their classes and functions may be used
LIBRARIES: dict[str, type] = {  # only subclasses of this class may be used: functions may load pickles
    "torch.nn": nn.Module,
    "torch.optim": Optimizer,
    "torchvision.models": nn.Module,
    "torchvision.datasets": Dataset,
    "torchvision.transforms": nn.Module,
    "timm.models": nn.Module,
    "timm.optim": Optimizer,
}
BUILDERS = ("torchvision.models._api.get_model",)  # functions that may be used; models/from_timm.py calls timm's
IMPORTABLE = (*OWN, *LIBRARIES, "timm")  # modules that may be imported, to see where an object is defined
COMPUTES = "torch.nn.functional"  # its functions compute on tensors, and do nothing else
UNPICKLES = "torchvision.datasets.lsun"  # its datasets load pickles
# Keys that make a library load code, download files, or load another file than the checkpoint, with pickles that could
# run code. `_args_` passes arguments by position, which would hide these names.
LOADS = ("trust_remote_code", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "download", "_args_")
PLAIN_TYPES = (str, int, float, bool, type(None))


def check_config(
    value: Any, source: object, trusted: Sequence[str] = (), option: str = "--trust {}", key: str = ""
) -> None:
    """Checks a run's config: nested dicts and lists of plain values, without interpolations.

    value: the config's part at `key`, all of it for "". source: where the config is from, for the error.
    trusted: modules and keys that the user trusts too. option: what the user has to add to trust another one, with {}
    in place of its name. Raises ConfigError for values that could run code, and for types that no config has.
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
    elif not isinstance(value, PLAIN_TYPES):
        raise ConfigError(f"{source}: {key} is a {type(value).__name__}, which no config has")
    elif isinstance(value, str) and "${" in value:
        raise ConfigError(f"{here} could read your secrets: if you trust it, add {trust}")


def warn_of_targets(config: Config) -> None:
    """Logs what has to be added to evaluate.py, predict.py and export.py to use this run, if they would refuse it."""
    try:
        sections = {"data": config.data, "task": config.task, "model": config.model}
        check_config(sections, "this run", option="--trust {} to evaluate.py, predict.py and export.py")
    except ConfigError as error:
        log.warning("%s", error)


def check_earlier(overrides: Iterable[str], run: Path, trusted: Sequence[str]) -> None:
    """Checks the overrides of an earlier run before Hydra reads them.

    They may choose groups of conf/ by name, and set keys to values that check_config allows. Hydra's own settings are
    refused: they could start programs, write to other places, or add a folder of configs. `trusted` keys may do all
    that. Raises ConfigError.
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
        adds_to_logger = section == "logger" and line.startswith("+")  # may be a program for wandb.init to start
        choices = [str(choice) for choice in (value if isinstance(value, list) else [value])]
        are_files_of_conf = all(re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name) and ".." not in name for name in choices)
        if (
            override is None
            or not re.fullmatch(r"\w+(\.\w+)*", key)  # with a package (@), or a group of Hydra's (/)
            or section == "hydra"
            or adds_to_logger
            or not (names_key or are_files_of_conf)
        ):
            raise ConfigError(
                f"{run}: the run's override {line} could run code, or write to other places: if you trust it, add "
                f"train.trust=[{key}]"
            )
        for name in reversed(key.split(".")):
            value = {name: value}
        check_config(value, run, trusted, "train.trust=[{}]")


def check_links(run: Path, parts: str = "*", trusted: Sequence[str] = (), option: str = "--trust {}") -> None:
    """Raises ConfigError for a link that leads out of the run's folder: writing or removing would follow it.

    parts: a glob of the files and folders in `run` to check. trusted, option: see check_config.
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
        f"{source} is not in this repository's data/, models/ or training/tasks.py, nor a network, loss, optimizer or "
        "dataset of torch, torchvision or timm: it could run any code; if you trust it, add "
        f"{option.format(text.rpartition('.')[0] or text)}"
    )
    if not isinstance(target, str) or not _lies_in(text, (*IMPORTABLE, *trusted)):
        raise refusal
    try:
        found = get_object(text)
    except Exception as error:
        raise ConfigError(f"{source} cannot be imported: {one_line(error)}") from error
    module = getattr(found, "__module__", None)
    if not (inspect.isclass(found) or inspect.isfunction(found)) or not isinstance(module, str):
        raise refusal
    if not (_lies_in(module, (*OWN, *trusted)) or _is_of_library(found, module)):
        raise refusal


def _is_of_library(found: type | Callable[..., Any], module: str) -> bool:
    if inspect.isclass(found):
        classes = tuple(allowed for library, allowed in LIBRARIES.items() if _lies_in(module, [library]))
        return issubclass(found, classes) and module != UNPICKLES
    if module == COMPUTES or f"{module}.{found.__name__}" in BUILDERS:
        return True
    if not _lies_in(module, ["torchvision.models"]):
        return False
    from torchvision.models import list_models  # imported here, because it takes a second

    return found.__name__ in list_models()


def _lies_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
