"""The config as dataclasses that check their values. targets.py builds the objects that its sections describe.

Every mistake in a value is a ConfigError. Mistakes on the command line are found by overrides.py before.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import check_choice
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
