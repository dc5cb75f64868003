"""Checks the settings of a run before they are used: those from a stranger must not run code on this machine.

A config names classes and functions by `_target_`, and Hydra imports and calls whatever is named. So a target must be
defined in data/ or models/, or be of the kind that its section needs (ROLES): a class of another package of this
repository, or of the libraries below. What counts is where it is defined, not the path to it:
data.image_folder.os.system is refused. A module is imported only if it belongs to these packages.
"""

import inspect
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from training.config import CONF, ConfigError, one_line
from training.run import METHODS as CALLBACK_METHODS
from training.tasks import Task
from training.trainer import Trainer

OWN = ("data", "models")  # their classes and functions may be used in any section
NOT_OWN = (*OWN, "loaders", "scripts", "tests", "training")  # a fork's own packages are the others
ROLES: dict[str, tuple[type | str, ...]] = {  # by section: base classes of a target, or methods, one of which it has
    "data": ("__getitem__", "__call__"),
    "task": (Task, nn.Module, "compute"),
    "model": (nn.Module,),
    "optim": (Optimizer,),
    "schedule": (LRScheduler,),
    "trainer": (Trainer,),
    "callbacks": CALLBACK_METHODS,
    "sampler": ("__iter__",),
    "batch_sampler": ("__iter__",),
}
TRAINING = ("task", "schedule", "trainer", "callbacks")  # the sections whose targets may be classes of training/
LIBRARIES: dict[str, tuple[type, ...]] = {  # subclasses of these classes: a library's functions may load pickles
    **dict.fromkeys(("torch.nn", "torchmetrics", "torchvision.models", "timm.models"), (nn.Module,)),
    **dict.fromkeys(("torch.optim", "timm.optim"), (Optimizer, LRScheduler)),
    **dict.fromkeys(("torchvision.datasets", "torchvision.transforms"), (Dataset, nn.Module)),
}
FUNCTIONS = ("torch.nn.functional", "torchvision.models._api.get_model", "training.schedule.cosine")  # without effects
UNPICKLES = "torchvision.datasets.lsun"
# Keys that make a library load code, download files, load pickles, start a program or write to another place.
# `_args_` passes arguments by position, which would hide these names.
LOADS = ("trust_remote_code", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "download", "_args_")


def check_config(
    value: Any, source: object, trusted: Sequence[str] = (), option: str = "--trust {}", key: str = ""
) -> None:
    """Checks a run's config: nested dicts and lists of plain values, without interpolations.

    value: the config's part at `key`, all of it for "". source: where the config is from, for the error.
    trusted: modules and keys that the user trusts too. option: what the user has to add to trust another one, with {}
    in place of its name. Raises ConfigError for values that could run code, and for types that no config has.
    """
    name, section = key.rpartition(".")[2], key.partition(".")[0]
    here, trust = f"{source}: {key}={value}", f"if you trust it, add {option.format(key)}"
    if _lies_in(key, trusted):
        return
    if name == "_target_" and value is not None:
        if not _is_allowed(value, section, trusted, here):
            raise ConfigError(
                f"{here} is not in this repository's data/ or models/, nor a class for this section in another of its "
                "packages or in torch, torchvision or timm: it could run any code; if you trust it, add "
                + option.format(str(value).rpartition(".")[0] or value)
            )
    elif (name in LOADS and value) or (section == "callbacks" and key.count(".") > 2):
        raise ConfigError(f"{here} could load code, or files that run code: {trust}")
    elif isinstance(value, dict | list | tuple):
        for child in value:
            inner, below = (value[child], f"{key}.{child}".lstrip(".")) if isinstance(value, dict) else (child, key)
            if key and isinstance(value, dict) and "." in str(child):  # it could look like a key that is trusted
                raise ConfigError(f"{source}: {key} has the key {child!r}, with a dot, which no config has")
            check_config(inner, source, trusted, option, below)
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ConfigError(f"{source}: {key} is a {type(value).__name__}, which no config has")
    elif isinstance(value, str) and "${" in value:
        raise ConfigError(f"{here} could read your secrets: {trust}")


def check_links(run: Path, parts: str = "*", trusted: Sequence[str] = (), option: str = "--trust {}") -> None:
    """Raises ConfigError for a link that leads out of the run's folder: writing or removing would follow it.

    parts: a glob of the files and folders in `run` to check. trusted, option: see check_config.
    """
    for path in (path for part in run.glob(parts) for path in (part, *part.rglob("*")) if path.is_symlink()):
        name = path.relative_to(run).parts[0]
        if not path.resolve().is_relative_to(run.resolve()) and name not in trusted:
            raise ConfigError(
                f"{path} is a link to {path.readlink()}, where files would be written or removed: remove it, "
                f"or if you trust it, add {option.format(name)}"
            )


def _is_allowed(target: Any, section: str, trusted: Sequence[str], here: str) -> bool:
    own, packages = (*OWN, *trusted), _packages()
    if not isinstance(target, str) or not _lies_in(target, (*own, *packages, *LIBRARIES, "timm", "training")):
        return False
    try:
        found = get_object(target)
    except Exception as error:
        raise ConfigError(f"{here} cannot be imported: {one_line(error)}") from error
    module, kinds = str(getattr(found, "__module__", None)), list[type | str]()
    if inspect.isfunction(found):
        networks = sys.modules["torchvision.models"].list_models() if _lies_in(module, ["torchvision.models"]) else []
        is_pure = _lies_in(f"{module}.{found.__name__}", FUNCTIONS) or found.__name__ in networks
        return _lies_in(module, own) or is_pure
    if not inspect.isclass(found) or module == UNPICKLES:
        return False
    if _lies_in(module, [*packages, *(["training"] if section in TRAINING else [])]):
        kinds += ROLES.get(section, ())
    kinds += [kind for library, classes in LIBRARIES.items() if _lies_in(module, [library]) for kind in classes]
    methods = {name for base in found.__mro__ for name in vars(base)}
    return _lies_in(module, own) or any(
        kind in methods if isinstance(kind, str) else issubclass(found, kind) for kind in kinds
    )


def _packages() -> list[str]:
    """A fork's own packages: folders of the repository with Python files, unless a run lies in them, or below them."""
    folders = {path.parent for path in CONF.parent.glob("[a-z]*/*.py") if path.parent.name not in NOT_OWN}
    runs = ("checkpoints", ".hydra", "*/checkpoints", "*/.hydra")
    return [folder.name for folder in folders if not any(any(folder.glob(name)) for name in runs)]


def _lies_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
