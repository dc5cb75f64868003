"""The config as dataclasses that check their values. targets.py builds the objects that its sections describe.

Every mistake in a value is a ConfigError. Mistakes on the command line are found by command_line.py before. A callback
may add typed keys to the sections `train` and `timing`: see Keys.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from data.errors import check_choice
from loaders import LoaderConfig, chosen_device

CONF = Path(__file__).resolve().parent.parent / "conf"
RESUME_KEYS = ("train.resume", "train.trust")  # they say how to continue a run, and do not belong to its settings
WATCHING = ("timing.", "callbacks.")  # settings that do not change what is trained


class ConfigError(ValueError):
    """A setting cannot work: a sentence with the key, its value, and what to do."""


class Keys:
    """The base class of dataclasses that add keys to a section: a callback's `keys` has one for each such section.

    A callback with `keys = {"train": EmaKeys}` finds the checked value in `run.config.train.ema`. Its yaml file sets
    the default. A `__post_init__` that checks values calls `super().__post_init__()`.
    """

    def __post_init__(self) -> None:
        pass


@dataclass
class TrainConfig(Keys):
    """The keys of the section `train`, which conf/config.yaml explains."""

    epochs: int
    steps_per_epoch: int | None
    eval_steps: int | None
    batch_size: int
    last_batch: str
    max_steps: int | None
    resume: str | None
    trust: list[str]
    checkpoint_every: str | None
    keep_checkpoints: int
    warmup_epochs: float
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
        counts = "epochs steps_per_epoch eval_steps max_steps batch_size accumulate keep_checkpoints log_interval"
        for key in (*counts.split(), "num_threads", "process_timeout"):
            check_least(f"train.{key}", getattr(self, key), 1)
        check_least("train.warmup_epochs", self.warmup_epochs, 0)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"train.clip_norm={self.clip_norm}: give a number above 0, or null for no clipping")
        self.channels_last = self.channels_last.lower()
        check_choice("train.channels_last", self.channels_last, ("auto", "true", "false"), ConfigError)
        self.freeze = [self.freeze] if isinstance(self.freeze, str) else list(self.freeze or [])
        check_choice("train.precision", self.precision, ("auto", "bf16", "fp16", "fp32"), ConfigError)
        check_choice("train.last_batch", self.last_batch, ("drop", "keep", "rollover"), ConfigError)
        self.checkpoint_interval()
        super().__post_init__()

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


def check_least(key: str, value: float | None, least: float) -> None:
    """Raises ConfigError for a finite or infinite number below `least`, for infinity and NaN; None passes."""
    if value is not None and not least <= value < math.inf:
        raise ConfigError(f"{key}={value}: give a number from {least}")


@dataclass
class TimingConfig(Keys):
    """The keys of the section `timing`, which conf/config.yaml explains."""

    warmup_steps: int

    def __post_init__(self) -> None:
        check_least("timing.warmup_steps", self.warmup_steps, 0)
        super().__post_init__()


@dataclass
class Config:
    """The whole config.

    `data`, `task`, `model`, `optim`, `schedule`, `trainer`, the samplers and each of `callbacks` have a `_target_` and
    its arguments; `data` also has the keys of conf/any_data.yaml. `augment` has the arguments of data.augment.Augment.
    `train` and `timing` also have the keys that callbacks add: `checked` makes them a TrainConfig and a TimingConfig.
    """

    data: dict[str, Any]
    task: dict[str, Any]
    augment: dict[str, float]
    model: dict[str, Any]
    optim: dict[str, Any]
    schedule: dict[str, Any]
    trainer: dict[str, Any]
    train: Any
    timing: Any
    device: str
    seed: int
    sampler: dict[str, Any]
    batch_sampler: dict[str, Any]
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    loader: LoaderConfig = field(default_factory=LoaderConfig)  # OmegaConf merges `int | str` only into a default

    def __post_init__(self) -> None:
        try:
            chosen_device(self.device)
        except RuntimeError as error:
            raise ConfigError(str(error)) from error
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: give an integer from 0 to 2^63 - 1")
        for group in ("scores", "metrics"):
            if not isinstance(given := self.task.get(group) or {}, dict):
                raise ConfigError(f"task.{group}={given}: write 'task.{group}={{NAME: {{_target_: {given}}}}}'")


ConfigStore.instance().store(name="schema", node=Config)


def checked(cfg: DictConfig) -> Config:
    """Returns the config as dataclasses. Raises ConfigError or LoaderConfigError for a value that cannot be used."""
    try:
        config = OmegaConf.to_object(with_types(cfg))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is not set: add {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    assert isinstance(config, Config)
    return config


def with_types(cfg: DictConfig) -> DictConfig:
    """A copy in which the sections `train` and `timing` have types, also those of the keys that callbacks add."""
    typed = cfg.copy()
    added = [item for callback in cfg.callbacks.values() for item in keys_of(callback.get("_target_", "")).items()]
    for section, base in (("train", TrainConfig), ("timing", TimingConfig)):
        schema = make_dataclass(section, [], bases=(*(keys for of, keys in added if of == section), base))
        for key in cfg[section].keys() - {known.name for known in fields(schema)}:
            raise ConfigError(f"{section}.{key}: no callback of this run has this key; ~{section}.{key} leaves it out")
        OmegaConf.update(typed, section, OmegaConf.structured(schema), merge=False)
        OmegaConf.update(typed, section, OmegaConf.to_container(cfg[section]), merge=True)
    return typed


def keys_of(target: str) -> dict[str, type]:
    """The `keys` of the callback that `target` names. If it cannot be imported, building it says so."""
    try:
        return dict(getattr(get_object(target), "keys", {}))
    except Exception:
        return {}


def changes(config: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """The settings of training that differ from an earlier run's: ["train.epochs is 3, was 2"]."""
    ours, theirs = flat(config), flat(earlier)
    keys = [key for key in theirs | ours if not key.startswith((*RESUME_KEYS, *WATCHING))]
    keys = [key for key in keys if ours.get(key) != theirs.get(key)]
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
