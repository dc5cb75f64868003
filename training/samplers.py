"""Which samples make a training batch, and how many steps a run has."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from loaders import Preloader
from loaders.samplers import check_resumable
from training.checks import is_stream
from training.config import Config, ConfigError
from training.processes import Processes
from training.targets import accepted, build, target


def build_order(config: Config, dataset: Any, processes: Processes) -> dict[str, Any]:
    """The arguments of build_loader that decide which samples of the training set make a batch.

    A stream has an order of its own; that of other sets may be that of `sampler` or `batch_sampler`. Their target gets
    those of dataset, data_source (the training set), labels (its labels, (N,)), seed, batch_size and drop_last that it
    accepts and its section does not set. A sampler gives the indices of an epoch, the same in all processes, which are
    split among them; a batch sampler gives the batches of this process, and gets rank and world_size too.
    Raises ConfigError for settings that contradict each other.
    """
    keys = [key for key in ("sampler", "batch_sampler") if getattr(config, key).get("_target_")]
    if len(keys) > 1:
        raise ConfigError("sampler and batch_sampler are both set: use one of them")
    key, steps, last_batch = "".join(keys), config.train.steps_per_epoch, config.train.last_batch
    name = type(dataset).__name__
    if is_stream(dataset):
        if steps is None:
            remedy = "set it to the number of steps after which the run evaluates"
            raise ConfigError(f"train.steps_per_epoch=null: {name} is a stream of unknown length: {remedy}")
        if key:
            raise ConfigError(f"{key}: {name} is a stream, whose samples come in its own order: leave it out")
        last_batch = "keep" if last_batch == "rollover" else last_batch
    elif steps is not None:
        raise ConfigError(f"train.steps_per_epoch={steps}: {name} has a length: set it to null")
    order: dict[str, Any] = {"shuffle": True, "last_batch": last_batch, "steps_per_epoch": steps}
    if not key:
        return order
    if last_batch == "rollover":
        raise ConfigError(f"{key} decides which samples an epoch has: add train.last_batch=keep, or drop")
    known = {
        "dataset": dataset,
        "data_source": dataset,
        "labels": getattr(dataset, "labels", None),
        "seed": config.seed,
        "batch_size": config.train.batch_size // processes.world_size,
        "drop_last": last_batch == "drop",
    }
    section = getattr(config, key)
    if key == "batch_sampler":
        known |= {"rank": processes.rank, "world_size": processes.world_size}
        if processes.world_size > 1 and not accepted(target(section), {"rank": 0}):
            raise ConfigError(
                f"batch_sampler: {section.get('_target_')} would give all {processes.world_size} processes the same "
                "batches: let it take rank and world_size, and give each rank its own, as many as the others"
            )
    sampler = build(key, section, optional=known)
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            f"{key}: a DistributedSampler's indices would be split among the processes again: leave it out"
        )
    try:
        check_resumable(sampler)
    except ValueError as error:  # the first checkpoint would be late to say so
        raise ConfigError(f"{key}: {error}") from error
    return order | {"shuffle": False, key: sampler}


def total_steps(config: Config, dataset: Any, loader: Preloader, processes: Processes) -> int:
    """The number of optimizer steps in all epochs.

    Raises ConfigError if an epoch has too few samples for a step, or not as many steps in all processes.
    """
    size = config.train.batch_size
    if len(set(lengths := processes.gather(len(loader)))) > 1:
        raise ConfigError(
            f"batch_sampler: an epoch has {', '.join(map(str, lengths))} batches in the processes of rank 0, 1, ...: "
            "give all ranks equally many, as all wait for one another in each step"
        )
    if not len(loader):
        raise ConfigError(f"train.batch_size={size}: there are only {len(dataset)} training samples; lower it")
    if config.train.last_batch == "rollover" and not is_stream(dataset):
        return config.train.epochs * len(dataset) // size
    return config.train.epochs * len(loader)
