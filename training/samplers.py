"""The samplers that `sampler` and `batch_sampler` name, and how many steps a run has."""

from __future__ import annotations

from typing import Any

from loaders import Preloader
from training.config import Config, ConfigError
from training.processes import Processes
from training.targets import accepted, build, target


def build_samplers(config: Config, dataset: Any, processes: Processes) -> dict[str, Any]:
    """The arguments of build_loader that replace the loader's own order; none without a sampler.

    A target gets those of dataset, data_source (the training set), labels (its labels, (N,)), seed, batch_size,
    drop_last, rank and world_size that it accepts and its section does not set. A sampler gives the indices of an
    epoch, the same in all processes, which are split among them; a batch sampler gives the batches of this process.
    Raises ConfigError for settings that contradict each other.
    """
    key = sampler_key(config)
    if not key:
        return {}
    if config.train.last_batch == "rollover":
        raise ConfigError(f"{key} decides which samples an epoch has: add train.last_batch=keep, or drop")
    known = {
        "dataset": dataset,
        "data_source": dataset,
        "labels": getattr(dataset, "labels", None),
        "seed": config.seed,
        "batch_size": config.train.batch_size // processes.world_size,
        "drop_last": config.train.last_batch == "drop",
        "rank": processes.rank,
        "world_size": processes.world_size,
    }
    section = getattr(config, key)
    if key == "batch_sampler" and processes.world_size > 1 and not accepted(target(section), {"rank": 0}):
        raise ConfigError(
            f"batch_sampler: {section.get('_target_')} would give all {processes.world_size} processes the same "
            "batches: let it take rank and world_size, and give each rank its own, as many as the others"
        )
    return {"shuffle": False, key: build(key, section, optional=known)}


def sampler_key(config: Config) -> str:
    """Which of the two sections is set: "sampler", "batch_sampler" or "". Raises ConfigError for both."""
    keys = [key for key in ("sampler", "batch_sampler") if getattr(config, key).get("_target_")]
    if len(keys) > 1:
        raise ConfigError("sampler and batch_sampler are both set: use one of them")
    return keys[0] if keys else ""


def total_steps(config: Config, samples: int, loader: Preloader) -> int:
    """The number of optimizer steps in all epochs. Raises ConfigError if an epoch has too few samples for a step."""
    epochs, size, last_batch = config.train.epochs, config.train.batch_size, config.train.last_batch
    if sampler_key(config):
        return epochs * len(loader)
    if samples < size and last_batch != "keep":
        raise ConfigError(f"train.batch_size={size}: there are only {samples} training samples; lower it")
    if last_batch == "rollover":
        return epochs * samples // size
    return epochs * (samples // size if last_batch == "drop" else -(-samples // size))
