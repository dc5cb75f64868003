"""Checks the settings of a run before they are used: those from a stranger must not run code on this machine.

A config names classes and functions by `_target_`, and Hydra imports and calls whatever is named. So a target must be
defined in data/ or models/, or be a class: of one of KINDS in LIBRARIES, or of these or with one of METHODS in
training/ or in another package of this repository. What counts is where it is defined, not the path to it:
data.image_folder.os.system is refused. A module is imported only if it belongs to these packages.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from training.config import CONF, ConfigError
from training.run import METHODS as CALLBACK_METHODS
from training.targets import reason_of
from training.tasks import Task
from training.trainer import Trainer

OWN = ("data", "models")  # all their classes and functions may be used
NOT_OWN = (*OWN, "loaders", "scripts", "tests", "training")  # a fork's own packages are the others
KINDS = (nn.Module, Optimizer, LRScheduler, Dataset, Task, Trainer)
METHODS = {*CALLBACK_METHODS, "__getitem__", "__call__", "__iter__", "compute"}  # of datasets, samplers and metrics
LIBRARIES = (
    "torch.nn",
    "torch.optim",
    "torchmetrics",
    "timm.models",
    "timm.optim",
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.transforms",
)
FUNCTIONS = ("torch.nn.functional", "torchvision.models._api.get_model", "training.schedule.cosine")  # without effects
UNPICKLES = "torchvision.datasets.lsun"
# Keys that make a library load code, download files, load pickles, start a program or write to another place.
# `_args_` passes arguments by position, which would hide these names.
LOADS = ("trust_remote_code", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "download", "_args_")


class Untrusted(ConfigError):
    """Something could run code: the user has to trust `name`, or the key of a config, which always suffices."""

    def __init__(self, sentence: str, option: str, name: str, key: str = "") -> None:
        super().__init__(f"{sentence}; if you trust it, add {option.format(name)}")
        self.name, self.key = name, key


def to_trust(config: dict[str, Any]) -> list[str]:
    """The names that a user of this config has to trust. Raises ConfigError for what cannot be trusted at all."""
    names = list(dict.fromkeys(refusal.name for refusal in refusals(config, "")))
    return names + [refusal.key for refusal in refusals(config, "", names)]  # a module may have it from another one


def check_config(
    value: Any, source: object, trusted: Sequence[str] = (), option: str = "--trust {}", key: str = ""
) -> None:
    """Checks a run's config: nested dicts and lists of plain values, without interpolations.

    value: the config's part at `key`, all of it for "". source: where the config is from, for the error.
    trusted: modules and keys that the user trusts too. option: what the user has to add to trust another one, with {}
    in place of its name. Raises ConfigError for values that could run code, and for types that no config has.
    """
    for refusal in refusals(value, source, trusted, option, key):
        raise refusal


def refusals(
    value: Any, source: object, trusted: Sequence[str] = (), option: str = "--trust {}", key: str = ""
) -> Iterator[Untrusted]:
    """Finds all that could run code; the arguments and errors are those of check_config."""
    name, here = key.rpartition(".")[2], f"{source}: {key}={value}"
    if _lies_in(key, trusted):
        return
    if name == "_target_" and value is not None:
        if not _is_allowed(value, trusted, here):
            yield Untrusted(
                f"{here} is not in this repository's data/ or models/, nor a class for a config in another of its "
                "packages or in torch, torchvision or timm: it could run any code",
                option,
                str(value).rpartition(".")[0] or value,
                key,
            )
    elif (name in LOADS and value) or (key.startswith("callbacks.") and key.count(".") > 2):
        yield Untrusted(f"{here} could load code, or files that run code", option, key)
    elif isinstance(value, dict):
        for child in value:
            if key and "." in str(child):  # it could look like a key that is trusted
                raise ConfigError(f"{source}: {key} has the key {child!r}, with a dot, which no config has")
            yield from refusals(value[child], source, trusted, option, f"{key}.{child}".lstrip("."))
    elif isinstance(value, list | tuple):
        for child in value:
            yield from refusals(child, source, trusted, option, key)
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ConfigError(f"{source}: {key} is a {type(value).__name__}, which no config has")
    elif isinstance(value, str) and "${" in value:
        yield Untrusted(f"{here} could read your secrets", option, key)


def check_links(run: Path, parts: str = "*", trusted: Sequence[str] = (), option: str = "--trust {}") -> None:
    """Raises ConfigError for a link that leads out of the run's folder: writing or removing would follow it.

    parts: a glob of the files and folders in `run` to check. trusted, option: see check_config.
    """
    for path in (path for part in run.glob(parts) for path in (part, *part.rglob("*")) if path.is_symlink()):
        name = path.relative_to(run).parts[0]
        if not path.resolve().is_relative_to(run.resolve()) and name not in trusted:
            text = f"{path} is a link to {path.readlink()}, where files would be written or removed: remove it"
            raise Untrusted(text, option, name)


def _is_allowed(target: Any, trusted: Sequence[str], here: str) -> bool:
    own, packages = (*OWN, *trusted), _packages()
    if not isinstance(target, str) or not _lies_in(target, (*own, *packages, *LIBRARIES, "timm", "training")):
        return False
    try:
        found = get_object(target)
    except Exception as error:
        raise ConfigError(f"{here} cannot be imported: {reason_of(error)}") from error
    module = str(getattr(found, "__module__", None))
    if inspect.isfunction(found):
        networks = sys.modules["torchvision.models"].list_models() if _lies_in(module, ["torchvision.models"]) else []
        is_pure = _lies_in(f"{module}.{found.__name__}", FUNCTIONS) or found.__name__ in networks
        return _lies_in(module, own) or is_pure
    if not inspect.isclass(found) or module == UNPICKLES:
        return False
    has_method = any(name in METHODS for base in found.__mro__ for name in vars(base))
    is_ours = has_method and _lies_in(module, ("training", *packages))
    is_kind = issubclass(found, KINDS) and _lies_in(module, ("training", *packages, *LIBRARIES))
    return _lies_in(module, own) or is_ours or is_kind


def _packages() -> list[str]:
    """A fork's own packages: folders of the repository with Python files, unless a run lies in them, or below them."""
    folders = {path.parent for path in CONF.parent.glob("[a-z]*/*.py") if path.parent.name not in NOT_OWN}
    runs = ("checkpoints", ".hydra", "*/checkpoints", "*/.hydra")
    return [folder.name for folder in folders if not any(any(folder.glob(name)) for name in runs)]


def _lies_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
