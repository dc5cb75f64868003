"""The types and bounds of the config, and a sentence for each mistake in it.

`check_overrides` compares keys and types with conf/ before Hydra starts, because Hydra 1.3 exits on a wrong override
without a suggestion. `checked` compares the values with their bounds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, UnionNode
from omegaconf.errors import OmegaConfBaseException

from data.errors import DataError, check_choice, did_you_mean
from loaders import LoaderConfig, LoaderConfigError
from loaders.machine import available_cores

CONF = Path(__file__).resolve().parent.parent / "conf"
TRIAL_TIMEOUT = 5.0  # seconds
LOGGERS = ("tensorboard", "wandb", "mlflow")  # each is the name of its package, too
TYPES = {bool: "true or false", int: "an integer", float: "a number"}


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
    label_smoothing: float
    clip_norm: float | None
    accumulate: int
    precision: str
    channels_last: bool
    num_threads: int | None
    compile: bool
    sync_batchnorm: bool
    process_timeout: float
    log_interval: int

    def __post_init__(self) -> None:
        counts = ("epochs", "batch_size", "max_steps", "keep_checkpoints", "accumulate", "log_interval", "num_threads")
        least = dict.fromkeys((*counts, "process_timeout"), 1)
        least |= dict.fromkeys(("warmup_epochs", "label_smoothing"), 0)
        for key, bound in least.items():
            value = getattr(self, key)
            if value is not None and not value >= bound:
                raise ConfigError(f"train.{key}={value}: give a number from {bound}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"train.clip_norm={self.clip_norm}: give a number above 0, or null for no clipping")
        if self.label_smoothing >= 1:
            raise ConfigError(f"train.label_smoothing={self.label_smoothing}: give a number from 0 to below 1")
        if self.num_threads is not None and self.num_threads > (os.cpu_count() or 1):
            raise ConfigError(
                f"train.num_threads={self.num_threads}: give at most {os.cpu_count()}, the number of cores"
            )
        check_choice("train.precision", self.precision, ("auto", "bf16", "fp32"), ConfigError)
        check_choice("train.last_batch", self.last_batch, ("drop", "keep", "rollover"), ConfigError)
        self.checkpoint_interval()

    def checkpoint_interval(self) -> tuple[int | None, float | None]:
        """The steps and the seconds between two checkpoints that `checkpoint_every` names; one of them is None."""
        if self.checkpoint_every is None:
            return None, None
        match = re.fullmatch(r"(\d*\.?\d+) ?(min)?", self.checkpoint_every)
        number = float(match[1]) if match else 0.0
        if not match or number <= 0 or (not match[2] and number % 1):
            raise ConfigError(
                f"train.checkpoint_every={self.checkpoint_every}: give a number of steps, such as 500, or of minutes, "
                "such as 10min; null saves at the ends of epochs alone"
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
    """The whole config. `data`, `model` and `optim` are a `_target_` and its arguments; `augment` those of Augment.

    `logger` has a section for each chosen logger.
    """

    data: dict[str, Any]
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
        for name in self.logger:
            check_choice("logger", name, LOGGERS, ConfigError)
            if find_spec(name) is None:
                raise ConfigError(f"logger={name} needs {name}, which is not installed: pip install {name}")


ConfigStore.instance().store(name="schema", node=Config)


def checked(cfg: DictConfig) -> Config:
    """The typed config. Raises ConfigError for a value that is out of bounds."""
    try:
        config = OmegaConf.to_object(cfg)
    except LoaderConfigError as error:
        raise ConfigError(str(error)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    assert isinstance(config, Config)
    return config


def build(name: str, section: dict[str, Any], *arguments: Any, **options: Any) -> Any:
    """Calls the `_target_` of the section called `name` with `arguments`, the section's keys and `options`.

    Raises ConfigError if there is no such target, or if it raises an error about its arguments. A DataError and other
    kinds of errors are raised unchanged.
    """
    keys = ", ".join(f"{key}={value}" for key, value in section.items() if key != "_target_")
    try:
        return instantiate(section, _partial_=True)(*arguments, **options)
    except DataError:
        raise
    except (InstantiationException, TypeError, ValueError, RuntimeError, LookupError) as error:
        reason = _one_line(error).partition(", set env var")[0]
        raise ConfigError(
            f"{name}: {section.get('_target_')}({keys}): {reason} (HYDRA_FULL_ERROR=1 shows where)"
        ) from error


def changed_loader(loader: LoaderConfig, overrides: Iterable[str]) -> LoaderConfig:
    """Returns the loader's config with overrides such as loader=prefetch and loader.num_workers=4.

    Another loader keeps the number of workers, if both have any. "auto" becomes a number: it would still be searched
    for while the loader is measured. There, a worker that takes longer than TRIAL_TIMEOUT is killed.
    """
    values = asdict(loader)
    for key, _, text in (override.partition("=") for override in overrides):
        value = yaml.safe_load(text)
        if key == "loader":
            preset = yaml.safe_load((CONF / "loader" / f"{value}.yaml").read_text())
            keeps = preset["num_workers"] and values["num_workers"]
            values = preset | ({"num_workers": values["num_workers"]} if keeps else {})
        elif key.startswith("loader."):
            values[key.removeprefix("loader.")] = value
    numbers = {"num_workers": available_cores(), "prefetch_factor": 4}
    values |= {key: number for key, number in numbers.items() if values[key] == "auto"}
    return LoaderConfig(**values | {"timeout": TRIAL_TIMEOUT})


def full_errors() -> bool:
    """Whether Hydra shows every error itself, with its traceback."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def check_overrides(arguments: list[str], conf: Path) -> None:
    """Raises ConfigError for a command-line override that has an unknown key, an unknown choice or a wrong type.

    With flags other than -m, such as --help or --cfg, or with HYDRA_FULL_ERROR=1, nothing is checked.
    """
    flags = {argument for argument in arguments if argument.startswith("-")}
    if flags - {"-m", "--multirun", "-r", "--run"} or full_errors():
        return
    overrides = _parsed([argument for argument in arguments if not argument.startswith(("-", "hydra"))])
    for override in overrides:
        if override.is_sweep_override() and not flags & {"-m", "--multirun"}:
            raise ConfigError(f"{override.input_line}: add -m to sweep over values, or give a list as key=[1,2]")
    with initialize_config_dir(str(conf), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for argument in arguments:  # Hydra itself would answer with a page
            if argument.startswith("hydra/launcher="):
                choices = loader.get_group_options("hydra/launcher")
                check_choice("hydra/launcher", argument.partition("=")[2], choices, ConfigError)
        groups = [override for override in overrides if loader.get_group_options(override.key_or_group)]
        for override in groups:
            key = override.key_or_group
            for value in _values(override):
                several = isinstance(value, list) and key == "logger"  # logger=[tensorboard,wandb]
                for choice in value if several else [value]:
                    if choice is not None:  # null leaves out an optional group such as debug
                        check_choice(key, str(choice), loader.get_group_options(key), ConfigError)
        try:
            known = compose("config", [f"{group.get_key_element()}={_values(group)[0] or 'null'}" for group in groups])
        except HydraException as error:
            raise ConfigError(_one_line(error)) from error
        names = [*_names(known), *(group for group in loader.list_groups("") if group != "hydra")]
    for override in overrides:
        adds_or_deletes = str(override.input_line).startswith(("+", "~"))
        if override not in groups and not (adds_or_deletes and not _is_typed(override.key_or_group)):
            for value in _values(override):
                _check_value(override.key_or_group, value, known, names)


def _parsed(lines: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(lines)
    except OverrideParseException as error:
        raise ConfigError(
            f"{error.override!r} cannot be read as key=value: an override looks like train.epochs=3"
        ) from error


def _is_typed(key: str) -> bool:
    """Whether the key's section is a dataclass, to which nothing can be added."""
    return key.startswith(("train.", "loader.", "timing."))


def _check_value(key: str, value: Any, known: DictConfig, names: list[str]) -> None:
    if key not in names:
        hint = did_you_mean(key, names)
        raise ConfigError(f"{key}={value}: there is no key {key}; {hint}python train.py --cfg job prints all keys")
    default = OmegaConf.select(known, key)
    if isinstance(default, DictConfig):
        raise ConfigError(f"{key}={value}: {key} is a section: set one of its keys, {', '.join(default)}")
    kind = type(default)
    takes = TYPES.get(kind, f"a {kind.__name__}")
    section, _, name = key.rpartition(".")
    if section and isinstance(OmegaConf.select(known, section)._get_node(name), UnionNode):  # int | str
        kind, takes = (str if value == "auto" else int), "an integer or auto"
    wants = f"it takes {takes}, such as {key}={str(default).lower()}"
    # The keys of data, model and optim are untyped: a value must have the type of the default.
    if kind in TYPES and value is not None and type(value) not in ((int, float) if kind is float else (kind,)):
        raise ConfigError(f"{key}={value}: {wants}")
    try:
        OmegaConf.update(known.copy(), key, value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={value}: {_one_line(error) if default is None else wants}") from error


def _values(override: Override) -> list[Any]:
    """The override's value, or the values that it sweeps over."""
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return [value.text if isinstance(value, QuotedString) else value for value in values]


def _names(config: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key, value in config.items_ex(resolve=False):
        name = f"{prefix}{key!s}"
        names += [name, *(_names(value, f"{name}.") if isinstance(value, DictConfig) else [])]
    return names


def _one_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
