"""The config's types and bounds, and one sentence for each way to get it wrong.

Names and types are checked against conf/ before Hydra starts (`check_overrides`), because Hydra 1.3 exits on a bad
override without a suggestion. Values are checked when the config is made (`checked`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from loaders import LoaderConfig, LoaderConfigError


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
        least = {
            "epochs": 1,
            "batch_size": 1,
            "max_steps": 1,
            "warmup_epochs": 0,
            "label_smoothing": 0,
            "accumulate": 1,
            "log_interval": 1,
            "timing_warmup_steps": 0,
        }
        for key, bound in least.items():
            value = getattr(self, key)
            if value is not None and not value >= bound:
                raise ConfigError(f"train.{key}={value}: give a number from {bound}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"train.clip_norm={self.clip_norm}: give a number above 0, or null for no clipping")
        if self.label_smoothing >= 1:
            raise ConfigError(f"train.label_smoothing={self.label_smoothing}: give a number from 0 to below 1")
        one_of("train.precision", self.precision, ("auto", "bf16", "fp32"))


@dataclass
class Config:
    """The whole config. `data`, `model` and `optim` hold a `_target_` and its keyword arguments."""

    data: dict[str, Any]
    model: dict[str, Any]
    optim: dict[str, Any]
    loader: LoaderConfig
    train: TrainConfig
    device: str
    seed: int

    def __post_init__(self) -> None:
        one_of("device", self.device, ("auto", "cpu", "cuda"))
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


def build(section: dict[str, Any], **arguments: Any) -> Any:
    """What the section's `_target_` makes of its keys and `arguments`; an error in it comes out as it was raised."""
    try:
        return instantiate(section, **arguments)
    except InstantiationException as error:
        if error.__cause__ is not None and str(error).startswith("Error in call to target"):
            raise error.__cause__ from None
        raise ConfigError(f"_target_: {section.get('_target_')}: {_one_line(error)}") from error


def one_of(key: str, value: str, choices: Sequence[str]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{key}={value}: {_did_you_mean(value, choices)}it is one of {', '.join(choices)}")


def check_overrides(arguments: list[str], conf: Path) -> None:
    """Raises ConfigError for the first command-line override that names or types something wrongly.

    Other flags than -m, such as --help or --cfg, leave all to Hydra, and so does HYDRA_FULL_ERROR=1.
    """
    flags = {argument for argument in arguments if argument.startswith("-")}
    if flags - {"-m", "--multirun", "-r", "--run"} or os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    lines = [argument for argument in arguments if not argument.startswith(("-", "hydra"))]
    with initialize_config_dir(str(conf), version_base="1.3"):
        try:
            overrides = OverridesParser.create().parse_overrides(lines)
        except OverrideParseException as error:
            raise ConfigError(
                f"{error.override!r} cannot be read as key=value: an override looks like train.epochs=3"
            ) from error
        if not flags & {"-m", "--multirun"}:
            for override in overrides:
                if override.is_sweep_override():
                    raise ConfigError(
                        f"{override.input_line}: add -m to sweep over values, or give a list as key=[1,2]"
                    )
        options = {override.key_or_group: _options(override.key_or_group) for override in overrides}
        groups = [override for override in overrides if options[override.key_or_group]]
        for override in groups:
            for choice in _choices(override):
                if choice != "null":  # leaves out an optional group such as debug
                    one_of(override.key_or_group, choice, options[override.key_or_group])
        try:
            known = compose(
                "config", overrides=[f"{group.get_key_element()}={_choices(group)[0]}" for group in groups]
            )
        except HydraException as error:
            raise ConfigError(_one_line(error)) from error
        for override in overrides:
            if override.is_add() and override.key_or_group.startswith(("train.", "loader.")):
                raise ConfigError(f"{override.input_line}: train and loader have fixed keys: leave out the +")
            if override not in groups and not (override.is_add() or override.is_force_add() or override.is_delete()):
                _check_value(override, known)


def _check_value(override: Override, known: DictConfig) -> None:
    key = override.key_or_group
    if not _has(known, key):
        groups = [group for group in GlobalHydra.instance().config_loader().list_groups("") if group != "hydra"]
        hint = _did_you_mean(key, [*_names(known), *groups])
        raise ConfigError(
            f"{override.input_line}: there is no key {key}; {hint}python train.py --cfg job prints all keys"
        )
    default = OmegaConf.select(known, key)
    if isinstance(default, DictConfig):
        raise ConfigError(f"{override.input_line}: {key} is a section: set one of its keys, {', '.join(default)}")
    for value in override.sweep_iterator() if override.is_sweep_override() else [override.value()]:
        wants = f"it takes {_a_type(type(default))}, such as {key}={str(default).lower()}"
        try:
            OmegaConf.update(known.copy(), key, value)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value}: {_one_line(error) if default is None else wants}") from error
        # The keys of data, model and optim have no types of their own but those of their defaults.
        same_type = isinstance(value, type(default)) or (isinstance(default, float) and isinstance(value, int))
        if isinstance(default, (int, float)) and (
            isinstance(value, bool) != isinstance(default, bool) or not same_type
        ):
            raise ConfigError(f"{key}={value}: {wants}")


def _options(group: str) -> list[str]:
    return GlobalHydra.instance().config_loader().get_group_options(group)


def _choices(override: Override) -> list[str]:
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


def _has(config: DictConfig, key: str) -> bool:
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return isinstance(node, DictConfig) and last in node


def _names(config: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key, value in config.items_ex(resolve=False):
        names += [f"{prefix}{key}", *(_names(value, f"{prefix}{key}.") if isinstance(value, DictConfig) else [])]
    return names


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    near = get_close_matches(given, list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


def _a_type(kind: type) -> str:
    return {int: "an integer", float: "a number", bool: "true or false"}.get(kind, f"a {kind.__name__}")


def _one_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
