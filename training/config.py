"""The config's types and bounds, and one sentence for each way to get it wrong.

Names and types are checked against conf/ before Hydra starts (`check_overrides`), because Hydra 1.3 exits on a bad
override without a suggestion. Values are checked when the config is made (`checked`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import DataError
from loaders import LoaderConfig, LoaderConfigError
from loaders import check_choice, did_you_mean

TYPES = {bool: "true or false", int: "an integer", float: "a number"}


class ConfigError(ValueError):
    """A setting that cannot work, in a sentence that names the key, the value given and what would do."""


@dataclass
class TrainConfig:
    """The keys of `train` in conf/config.yaml, where each is explained."""

    epochs: int
    batch_size: int
    max_steps: int | None
    resume: str | None
    warmup_epochs: float
    label_smoothing: float
    clip_norm: float | None
    accumulate: int
    precision: str
    channels_last: bool
    compile: bool
    log_interval: int
    timing_warmup_steps: int

    def __post_init__(self) -> None:
        least = dict.fromkeys(("epochs", "batch_size", "max_steps", "accumulate", "log_interval"), 1)
        least |= dict.fromkeys(("warmup_epochs", "label_smoothing", "timing_warmup_steps"), 0)
        for key, bound in least.items():
            value = getattr(self, key)
            if value is not None and not value >= bound:
                raise ConfigError(f"train.{key}={value}: give a number from {bound}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"train.clip_norm={self.clip_norm}: give a number above 0, or null for no clipping")
        if self.label_smoothing >= 1:
            raise ConfigError(f"train.label_smoothing={self.label_smoothing}: give a number from 0 to below 1")
        check_choice("train.precision", self.precision, ("auto", "bf16", "fp32"), ConfigError)


@dataclass
class Config:
    """The whole config. `data`, `model` and `optim` hold a `_target_` and its arguments; `augment`, Augment's."""

    data: dict[str, Any]
    augment: dict[str, float]
    model: dict[str, Any]
    optim: dict[str, Any]
    loader: LoaderConfig
    train: TrainConfig
    device: str
    seed: int

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("auto", "cpu", "cuda"), ConfigError)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device=cuda, but torch finds no CUDA device here: use device=auto or device=cpu")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: give an integer from 0 to 2^63 - 1")


ConfigStore.instance().store(name="schema", node=Config)


def checked(cfg: DictConfig) -> Config:
    """The typed config. Raises ConfigError for a value out of its bounds."""
    try:
        return OmegaConf.to_object(cfg)
    except LoaderConfigError as error:
        raise ConfigError(str(error)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error


def build(name: str, section: dict[str, Any], *arguments: Any, **options: Any) -> Any:
    """What the `_target_` of the section called `name` makes of its keys, `arguments` and `options`.

    Raises ConfigError where there is no such target or it refuses its keys; its other errors come out as raised.
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


def full_errors() -> bool:
    """Whether every error is left to Hydra, which then shows its traceback."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def check_overrides(arguments: list[str], conf: Path) -> None:
    """Raises ConfigError for the first command-line override that names or types something wrongly.

    Other flags than -m, such as --help or --cfg, leave all to Hydra, and so does HYDRA_FULL_ERROR=1.
    """
    flags = {argument for argument in arguments if argument.startswith("-")}
    if flags - {"-m", "--multirun", "-r", "--run"} or full_errors():
        return
    lines = [argument for argument in arguments if not argument.startswith(("-", "hydra"))]
    with initialize_config_dir(str(conf), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        try:
            overrides = OverridesParser.create().parse_overrides(lines)
        except OverrideParseException as error:
            raise ConfigError(
                f"{error.override!r} cannot be read as key=value: an override looks like train.epochs=3"
            ) from error
        groups, others = [], []
        for override in overrides:
            key, values = override.key_or_group, _values(override)
            if override.is_sweep_override() and not flags & {"-m", "--multirun"}:
                raise ConfigError(f"{override.input_line}: add -m to sweep over values, or give a list as key=[1,2]")
            if choices := loader.get_group_options(key):
                for choice in values:
                    if choice is not None:  # null leaves out an optional group such as debug
                        check_choice(key, str(choice), choices, ConfigError)
                groups.append(f"{override.get_key_element()}={values[0] or 'null'}")
            elif not override.input_line.startswith(("+", "~")) or key.startswith(("train.", "loader.")):
                others += [(key, value) for value in values]
        try:
            known = compose("config", overrides=groups)
        except HydraException as error:
            raise ConfigError(_one_line(error)) from error
        names = [*_names(known), *(group for group in loader.list_groups("") if group != "hydra")]
    for key, value in others:
        if key not in names:
            hint = did_you_mean(key, names)
            raise ConfigError(f"{key}={value}: there is no key {key}; {hint}python train.py --cfg job prints all keys")
        _check_value(key, value, known)


def _check_value(key: str, value: Any, known: DictConfig) -> None:
    default = OmegaConf.select(known, key)
    if isinstance(default, DictConfig):
        raise ConfigError(f"{key}={value}: {key} is a section: set one of its keys, {', '.join(default)}")
    kind = type(default)
    wants = f"it takes {TYPES.get(kind, f'a {kind.__name__}')}, such as {key}={str(default).lower()}"
    # The keys of data, model and optim have no types of their own but those of their defaults.
    if kind in TYPES and value is not None and type(value) not in ((int, float) if kind is float else (kind,)):
        raise ConfigError(f"{key}={value}: {wants}")
    try:
        OmegaConf.update(known.copy(), key, value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={value}: {_one_line(error) if default is None else wants}") from error


def _values(override: Override) -> list[Any]:
    """Its value, or those that it sweeps over."""
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return [value.text if isinstance(value, QuotedString) else value for value in values]


def _names(config: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key, value in config.items_ex(resolve=False):
        names += [f"{prefix}{key}", *(_names(value, f"{prefix}{key}.") if isinstance(value, DictConfig) else [])]
    return names


def _one_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
