"""The config as dataclasses that check their values, and functions that build objects from its sections.

Every mistake in a value is a ConfigError. Mistakes on the command line are found by overrides.py before.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from traceback import extract_tb
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import DataError, check_choice, did_you_mean
from loaders import LoaderConfig, LoaderConfigError

CONF = Path(__file__).resolve().parent.parent / "conf"
LOGGERS = ("tensorboard", "wandb", "mlflow")  # each is also the name of its package
RESUME_KEYS = ("train.resume", "train.trust")  # they say how to continue a run, and do not belong to its settings

ARGUMENT_ERRORS = (AssertionError, LookupError, RuntimeError, TypeError, ValueError)  # raised for bad arguments


class ConfigError(ValueError):
    """A setting cannot work: a sentence with the key, its value, and what to do."""


@dataclass
class TrainConfig:
    """The keys of the section `train`, which conf/config.yaml explains."""

    epochs: int
    batch_size: int
    last_batch: str
    max_steps: int | None
    resume: str | None
    trust: list[str]
    checkpoint_every: str | None
    keep_checkpoints: int
    warmup_epochs: float
    early_stop: int | None
    ema: float | None
    clip_norm: float | None
    freeze: Any  # None, a name or a list of names
    accumulate: int
    precision: str
    channels_last: str  # OmegaConf converts true to "True"
    num_threads: int | None
    compile: bool
    sync_batchnorm: bool
    process_timeout: float
    log_interval: int

    def __post_init__(self) -> None:
        counts = ("epochs", "batch_size", "max_steps", "keep_checkpoints", "accumulate", "log_interval", "num_threads")
        least = dict.fromkeys((*counts, "early_stop", "process_timeout"), 1) | {"warmup_epochs": 0}
        for key, bound in least.items():
            value = getattr(self, key)
            if value is not None and not value >= bound:
                raise ConfigError(f"train.{key}={value}: give a number from {bound}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"train.clip_norm={self.clip_norm}: give a number above 0, or null for no clipping")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"train.ema={self.ema}: give a decay between 0 and 1, such as 0.999, or null for no EMA")
        self.channels_last = self.channels_last.lower()
        check_choice("train.channels_last", self.channels_last, ("auto", "true", "false"), ConfigError)
        if self.num_threads is not None and self.num_threads > (os.cpu_count() or 1):
            raise ConfigError(
                f"train.num_threads={self.num_threads}: give at most {os.cpu_count()}, the number of cores"
            )
        self.freeze = [self.freeze] if isinstance(self.freeze, str) else list(self.freeze or [])
        if not all(isinstance(name, str) for name in self.freeze):
            raise ConfigError(f"train.freeze={self.freeze}: give backbone, a list such as [conv1,layer1], or null")
        check_choice("train.precision", self.precision, ("auto", "bf16", "fp32"), ConfigError)
        check_choice("train.last_batch", self.last_batch, ("drop", "keep", "rollover"), ConfigError)
        self.checkpoint_interval()

    def checkpoint_interval(self) -> tuple[int | None, float | None]:
        """Parses `checkpoint_every`: (steps, None), (None, seconds), or (None, None) if it is null."""
        if self.checkpoint_every is None:
            return None, None
        match = re.fullmatch(r"(\d*\.?\d+) ?(min)?", self.checkpoint_every)
        number = float(match[1]) if match else 0.0
        if not match or number <= 0 or (not match[2] and number % 1):
            raise ConfigError(
                f"train.checkpoint_every={self.checkpoint_every}: give a number of steps, such as 500, or of minutes, "
                "such as 10min; null saves only at the end of each epoch"
            )
        return (None, number * 60) if match[2] else (int(number), None)


@dataclass
class TimingConfig:
    """The keys of the section `timing`, which conf/config.yaml explains."""

    warmup_steps: int
    timeline: int
    trial_seconds: float

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"timing.{key}={value}: give a number from 0")


@dataclass
class Config:
    """The whole config.

    `data`, `task`, `model` and `optim` have a `_target_` and its arguments; `data` also has the keys of
    conf/any_data.yaml. `augment` has the arguments of data.augment.Augment, `logger` a section per chosen logger.
    """

    data: dict[str, Any]
    task: dict[str, Any]
    augment: dict[str, float]
    model: dict[str, Any]
    optim: dict[str, Any]
    train: TrainConfig
    timing: TimingConfig
    device: str
    seed: int
    logger: dict[str, dict[str, Any]] = field(default_factory=dict)
    loader: LoaderConfig = field(default_factory=LoaderConfig)  # OmegaConf merges `int | str` only into a default

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("auto", "cpu", "cuda"), ConfigError)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device=cuda, but torch finds no CUDA device here: use device=auto or device=cpu")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: give an integer from 0 to 2^63 - 1")
        if self.data.get("decode_on") == "device":
            self._check_decode_on_device()
        if not isinstance(scores := self.task.get("scores") or {}, dict):
            raise ConfigError(f"task.scores={scores}: write 'task.scores={{NAME: {{_target_: {scores}}}}}'")
        for name in self.logger:
            check_choice("logger", name, LOGGERS, ConfigError)
            if find_spec(name) is None:
                raise ConfigError(f"logger={name} needs {name}, which is not installed: pip install {name}")

    def _check_decode_on_device(self) -> None:
        if self.device == "cpu" or not torch.cuda.is_available():
            raise ConfigError(
                "data.decode_on=device needs a GPU, and this run is on the CPU: use data.decode_on=workers"
            )
        if self.loader.name in ("resident", "torch"):
            raise ConfigError(
                f"data.decode_on=device: loader={self.loader.name} needs decoded images: use loader=prefetch"
            )


ConfigStore.instance().store(name="schema", node=Config)


def checked(cfg: DictConfig) -> Config:
    """Returns the config as dataclasses. Raises ConfigError for a value of a wrong type or out of bounds."""
    try:
        config = OmegaConf.to_object(cfg)
    except LoaderConfigError as error:
        raise ConfigError(str(error)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    assert isinstance(config, Config)
    return config


def build(
    name: str, section: dict[str, Any], *arguments: Any, optional: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Calls the `_target_` of the section called `name` with `arguments`, the section's keys and `options`.

    Also passes those of `optional` that the section does not set and the target accepts. Raises a DataError of the
    target unchanged; ConfigError if the section has no target, or if the target cannot be imported or called.
    """
    if not section.get("_target_"):
        raise ConfigError(
            f"{name} has no _target_: its file in conf/{name}/ needs the line '_target_: MODULE.NAME', with the class "
            "or function to call"
        )
    keys = ", ".join(f"{key}={value}" for key, value in section.items() if key != "_target_")
    try:
        target = instantiate(section, _partial_=True)
        not_set = {key: value for key, value in (optional or {}).items() if key not in section}
        return target(*arguments, **options, **accepted(target.func, not_set))
    except DataError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: {section['_target_']}({keys}): {reason_of(error)}") from error


def function_of(name: str, section: Any) -> Any:
    """Returns the function that the section called `name` describes: its `_target_`, or if that is a class, an object.

    The section's other keys are keyword arguments. Raises ConfigError if the section has no `_target_`, or if that
    cannot be imported or constructed.
    """
    if not isinstance(section, dict) or "_target_" not in section:
        value = f"{{_target_: {section if isinstance(section, str) else 'MODULE.NAME'}}}"
        scores, _, score = name.rpartition(".")
        if scores == "task.scores":  # a new key in a section that is null by default: only the whole can be set
            name, value = scores, f"{{{'NAME' if score == '_target_' else score}: {value}}}"
        raise ConfigError(f"{name} has {section} in place of a function: write '{name}={value}', with its arguments")
    try:
        target = instantiate(section, _partial_=True)
        return target() if inspect.isclass(target.func) else target
    except Exception as error:
        raise ConfigError(f"{name}: {section['_target_']}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """Says why a target could not be imported or called: the error that Hydra's own ones hide, its type and place."""
    while error.__cause__ and (isinstance(error, InstantiationException) or str(error).startswith("Error loading '")):
        error = error.__cause__
    reason = one_line(error)
    if isinstance(error, SyntaxError):
        reason = error.msg
    elif isinstance(error, ModuleNotFoundError) and error.name:
        parent, _, missing = error.name.rpartition(".")
        if module := sys.modules.get(parent):
            known = [*vars(module), *(found.name for found in iter_modules(getattr(module, "__path__", [])))]
            return f"{parent} has no {missing}: {did_you_mean(missing, known)}".rstrip(": ")
    if not reason or not isinstance(error, (InstantiationException, OSError, ValueError)):  # their messages suffice
        reason = f"{type(error).__name__}: {reason}".rstrip(": ")
    return f"{reason} ({_place(error)}HYDRA_FULL_ERROR=1 shows the traceback)"


def _place(error: BaseException) -> str:
    """The innermost line of this repository's files that the error names or passed: "data/mine.py line 3; "."""
    places = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    for file, line in reversed(places):
        path = Path(file)
        if path.is_relative_to(CONF.parent) and "site-packages" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(CONF.parent)} line {line}; "
    return ""


def accepted(function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that the function or class accepts.

    One with **kwargs, such as torchvision.models.resnet18, gets `num_classes` in addition to the named options.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function that is not written in Python may have no signature
        return options
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = {*parameters, *(["num_classes"] if takes_any else [])}
    return {key: value for key, value in options.items() if key in names}


def changes(config: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """The settings of a run that differ from an earlier one's: ["train.epochs is 3, was 2"]."""
    ours, theirs = flat(config), flat(earlier)
    keys = [key for key in theirs | ours if key not in RESUME_KEYS and ours.get(key) != theirs.get(key)]
    return [f"{key} is {ours.get(key, 'left out')}, was {theirs.get(key, 'left out')}" for key in keys]


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dictionaries to one, with keys such as `train.epochs`."""
    if not isinstance(config, dict):
        return {prefix: config}
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return values


def full_errors() -> bool:
    """Whether Hydra shows every error itself, with its traceback."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def one_line(error: BaseException) -> str:
    """The first line of the error's message."""
    return str(error).partition("\n")[0]
