"""Checks a run's folder before it is used: a folder from a stranger must not run code on this machine.

A config names classes and functions by `_target_`, and Hydra imports and calls whatever is named. So the targets of a
run must be defined in this repository's data/ or models/, be a class of the section's role (a network in `model`, a
callback in `callbacks`) in another package of this repository, or be networks, losses, optimizers, datasets or
transforms of the libraries below. What counts is where an object is defined, not the path to it:
data.image_folder.os.system is refused. A module is imported only if its name belongs to these packages. The packages
loaders, scripts and tests do not count, and training only for tasks, trainers, schedules and callbacks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.utils import get_object
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from training.config import CONF, ConfigError, one_line
from training.metrics import METHODS as METRIC_METHODS
from training.run import METHODS as CALLBACK_METHODS
from training.schedule import cosine
from training.tasks import Task
from training.trainer import Trainer

OWN = ("data", "models")  # all their classes and functions may be used
PARTS = ("training.tasks", "training.trainer", "training.schedule", "training.callbacks")
NOT_OWN = ("data", "loaders", "models", "scripts", "tests", "training")  # other packages have a fork's own classes
LIBRARIES: dict[str, Any] = {  # only subclasses of these classes may be used: functions may load pickles
    "torch.nn": nn.Module,
    "torch.optim": (Optimizer, LRScheduler),
    "torchmetrics": nn.Module,
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
ROLES: dict[str, Callable[[Any], bool]] = {  # by section: whether a class of a fork's own package may be used there
    "data": lambda found: hasattr(found, "__getitem__") or any("__call__" in vars(kind) for kind in found.__mro__),
    "task": lambda found: issubclass(found, (Task, nn.Module)) or all(map(partial(hasattr, found), METRIC_METHODS)),
    "model": lambda found: issubclass(found, nn.Module),
    "optim": lambda found: issubclass(found, Optimizer),
    "schedule": lambda found: issubclass(found, LRScheduler),
    "trainer": lambda found: issubclass(found, Trainer),
    "callbacks": lambda found: any(hasattr(found, name) for name in CALLBACK_METHODS),
    "sampler": lambda found: hasattr(found, "__iter__"),
    "batch_sampler": lambda found: hasattr(found, "__iter__"),
}
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
        _check_target(value, here, trusted, option, key.partition(".")[0])
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
        # An argument that is added to a callback may be a program for wandb.init to start.
        adds_argument = section == "callbacks" and line.startswith("+") and not key.endswith("._target_")
        choices = [str(choice) for choice in (value if isinstance(value, list) else [value])]
        are_files_of_conf = all(re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name) and ".." not in name for name in choices)
        if (
            override is None
            or not re.fullmatch(r"\w+(\.\w+)*", key)  # with a package (@), or a group of Hydra's (/)
            or section == "hydra"
            or adds_argument
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


def _check_target(target: Any, source: str, trusted: Sequence[str], option: str, section: str) -> None:
    text = str(target)
    refusal = ConfigError(
        f"{source} is not in this repository's data/, models/ or training/tasks.py, nor a class for this section in "
        "another of its packages, nor a network, loss, optimizer or dataset of torch, torchvision or timm: it could "
        f"run any code; if you trust it, add {option.format(text.rpartition('.')[0] or text)}"
    )
    own = own_packages()
    if not isinstance(target, str) or not _lies_in(text, (*IMPORTABLE, *PARTS, *own, *trusted)):
        raise refusal
    try:
        found = get_object(text)
    except Exception as error:
        raise ConfigError(f"{source} cannot be imported: {one_line(error)}") from error
    module = getattr(found, "__module__", None)
    if not (inspect.isclass(found) or inspect.isfunction(found)) or not isinstance(module, str):
        raise refusal
    if _lies_in(module, (*OWN, *trusted)) or _is_of_library(found, module):
        return
    if found is cosine or (
        _lies_in(module, (*PARTS, *own)) and inspect.isclass(found) and section in ROLES and ROLES[section](found)
    ):
        return
    raise refusal


def own_packages() -> list[str]:
    """A fork's own packages: folders of the repository with Python files, unless a run lies in them, or below them."""
    folders = {path.parent for path in CONF.parent.glob("[a-z]*/*.py") if path.parent.name not in NOT_OWN}
    run_files = ("checkpoints", ".hydra", "*/checkpoints", "*/.hydra")
    return sorted(folder.name for folder in folders if not any(any(folder.glob(name)) for name in run_files))


def _is_of_library(found: type | Callable[..., Any], module: str) -> bool:
    if inspect.isclass(found):
        allowed = [classes for library, classes in LIBRARIES.items() if _lies_in(module, [library])]
        return any(issubclass(found, classes) for classes in allowed) and module != UNPICKLES
    if module == COMPUTES or f"{module}.{found.__name__}" in BUILDERS:
        return True
    if not _lies_in(module, ["torchvision.models"]):
        return False
    from torchvision.models import list_models  # imported here, because it takes a second

    return found.__name__ in list_models()


def _lies_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
