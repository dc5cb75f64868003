"""Small runs in this process: their configs, and what they leave in their folders. They use no extras."""

import gc
import json
import pickle
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

import train as script  # registers the schema of the config

CONF = Path(__file__).resolve().parents[1] / "conf"
EXTENSIONS = "tests.training.extensions"


def separate(*texts: str) -> list[str]:
    """The overrides of texts that have one or several each, as a command line has them."""
    return [override for text in texts if text for override in re.split(r" (?=[\w.+~@/]+=)", text)]


# 16 steps in two epochs. torch's loader, which starts no process, and a network without batch norm, which would make
# results depend on the parts of a batch.
SMALL = separate(
    "data=synthetic data.length=256 data.test_length=64 data.image_size=8 train.batch_size=32 train.epochs=2 "
    "train.log_interval=3 loader=torch loader.num_workers=0 callbacks/standard=[best,ema] model=linear"
)
# Two steps in an epoch. The `size` of the network shows which settings a run has.
FAST = [*SMALL, *separate("data.length=64 data.test_length=16 train.epochs=1 train.log_interval=1")]
IMAGES = f"data._target_={EXTENSIONS}.Images train.batch_size=16 data.length=64 model._target_={EXTENSIONS}.linear"
TWO_PARTS = f"model._target_={EXTENSIONS}.TwoParts"
DARKENED = f"augment.transform={{_target_: {EXTENSIONS}.darkened, _partial_: true}}"
STOP = f"+callbacks.stop._target_={EXTENSIONS}.Stop"
MIXTURE = "data=mix data.weights={one: 1, two: 2} " + " ".join(
    f"+data@data.parts.{name}=synthetic data.parts.{name}.seed={seed} data.parts.{name}.length={length} "
    f"data.parts.{name}.image_size=8 data.parts.{name}.test_length=17"
    for name, seed, length in (("one", 0, 64), ("two", 1, 32))
)


def composed(*texts: str) -> DictConfig:
    """The config that train.py has with these overrides. Hydra gets only choices of groups and new keys."""
    overrides = separate(*texts)
    for_hydra = [text for text in overrides if text[0] in "+~" or (CONF / text.partition("=")[0]).is_dir()]
    config = composed_by_hydra(*for_hydra)
    config.merge_with(OmegaConf.from_dotlist([text for text in overrides if text not in for_hydra]))
    return config


def composed_by_hydra(*overrides: str) -> DictConfig:
    return pickle.loads(pickled(*overrides))


@cache
def pickled(*overrides: str) -> bytes:
    """Cached: composing a config takes longer than a small run, and its deep copy takes four times as long as this."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return pickle.dumps(compose("config", overrides=list(overrides)))


def merge_once() -> None:
    """Makes Hydra merge the same config files once, and not for each run of each test."""
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    merged = {}

    def cached(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> DictConfig:
        files = str(defaults), str([source.path for source in repo.get_sources()])
        if files not in merged:
            merged[files] = pickle.dumps(merge(self, defaults, repo))
        return pickle.loads(merged[files])

    ConfigLoaderImpl._compose_config_from_defaults_list = cached


merge_once()


def complete(settings: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The settings and the overrides, each key once. Those of data are left out if the overrides choose other data."""
    if any(text.startswith("data=") for text in overrides):
        settings = [text for text in settings if not text.startswith("data")]
    return list({text.partition("=")[0]: text for text in (*settings, *overrides)}.values())


def stop(at: int, how: str = "SIGTERM") -> list[str]:
    return [STOP, f"+callbacks.stop.at={at}", f"+callbacks.stop.how={how}"]


def train(folder: Path, *texts: str) -> dict[str, Any]:
    """Trains with SMALL and the overrides, and returns the summary."""
    try:
        return script.train_model(composed(*complete(SMALL, separate(*texts))), folder)
    finally:
        gc.freeze()  # the run has unfrozen all objects, and the next run would collect them for longer than it trains


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of training steps, without those of evaluations."""
    return [line for line in metrics(folder) if "lr" in line]


def logged(folder: Path, key: str, having: str = "") -> list[Any]:
    """The values of a key in the lines of metrics.jsonl that have it, and `having`: "lr" those of training steps."""
    return [line[key] for line in metrics(folder) if key in line and having in {"", *line}]


def untimed(folder: Path) -> list[dict[str, Any]]:
    """The lines without the speed of the machine."""
    times = "images_per_second", "data_wait_fraction"
    return [{name: line[name] for name in line if name not in times} for line in metrics(folder)]


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def checkpoint(folder: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"{name}.pt", weights_only=True)


def differing_weights(one: Path, other: Path) -> list[str]:
    """The weights that differ in the newest checkpoints of two runs."""
    return differences(checkpoint(one)["model"], checkpoint(other)["model"])


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Returns the places at which two checkpoints differ, if only by a bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys(), key=str)
        return [text for key in keys for text in differences(one.get(key), other.get(key), f"{where}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [text for pair in zip(one, other, strict=True) for text in differences(*pair, f"{where}[]")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_equal = torch.equal(one, other)
    else:
        is_equal = type(one) is type(other) and one == other
    return [] if is_equal else [where]
