"""Builds a loader from a config; settings that cannot work, alone or together, raise an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from .arguments import ON_ERROR, LoaderConfigError, check_choice, checked_last_batch
from .cached_loader import CachedLoader
from .machine import available_cores
from .preload.accelerator import checked_device
from .preload.device_copy import Transform
from .preload.preloader import Preloader
from .resident_loader import ResidentLoader
from .torch_loader import TorchLoader
from .torch_stream import TorchStream
from .worker_loader import WorkerLoader
from .workers.engine import has_pool

LOADERS = ("cached", "prefetch", "resident", "threads", "torch", "workers")
AUTO = ("num_workers", "prefetch_factor")  # keys that also take "auto"
MOST_WORKERS_PER_CORE = 64  # more cannot help, even if they only wait for a network


@dataclass
class LoaderConfig:
    """The keys of conf/loader/*.yaml, the same for every loader.

    Raises LoaderConfigError for a value out of range.
    """

    name: str = "prefetch"
    num_workers: int | str = "auto"
    prefetch_factor: int | str = "auto"
    preload_depth: int = 2
    on_error: str = "raise"
    timeout: float = 0.0
    streams: int = 8  # of an iterable dataset: see WorkerLoader
    shuffle_buffer: int = 0

    def __post_init__(self) -> None:
        check_choice("loader.name", self.name, LOADERS, LoaderConfigError)
        check_choice("loader.on_error", self.on_error, ON_ERROR, LoaderConfigError)
        if self.name in ("resident", "torch") and self.on_error == "skip":
            raise LoaderConfigError(
                f"loader.on_error=skip: loader={self.name} cannot leave out samples, use loader=workers"
            )
        numbers = {"num_workers": 0, "prefetch_factor": 1, "preload_depth": 0, "timeout": 0}
        for key, least in (numbers | {"streams": 1, "shuffle_buffer": 0}).items():
            value, takes_auto = getattr(self, key), key in AUTO
            if takes_auto and value == "auto":
                continue
            if isinstance(value, str) or not least <= value < math.inf:
                or_auto = ", or auto" if takes_auto else ""
                raise LoaderConfigError(f"loader.{key}={value}: give a number from {least}{or_auto}")
        cores = available_cores()
        most = MOST_WORKERS_PER_CORE * cores
        if self.num_workers != "auto" and int(self.num_workers) > most:
            raise LoaderConfigError(
                f"loader.num_workers={self.num_workers}: this process may use {cores} cores, and more than "
                f"{MOST_WORKERS_PER_CORE} workers per core cannot help: give at most {most}, or auto"
            )


def build_loader(
    config: LoaderConfig,
    dataset: Any,
    *,
    batch_size: int,
    seed: int,
    shuffle: bool = False,
    drop_last: bool = False,
    last_batch: str | None = None,
    pad: bool = True,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    transform: Transform | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Any = None,
    batch_sampler: Any = None,
    steps_per_epoch: int | None = None,
) -> Preloader:
    """Builds the loader that `config` names: batches of `dataset` on `device`, transformed.

    `workers` reads in processes, `threads` in threads, `torch` is the stock DataLoader, `resident` keeps the dataset
    on the device. `preload_depth` > 0 adds a preloader's thread to any of them; `prefetch` is `workers` with such a
    thread. On a CPU no thread is added if workers read: there is nothing to copy, and the thread would take time from
    the step. `cached` repeats the first batches of `prefetch`, if `shuffle` is true or there is a sampler.
    With `num_workers="auto"` a WorkerLoader chooses the number while it is used; `torch` takes all available cores.

    batch_size: per rank.
    seed, shuffle, rank, world_size, pad, drop_last, last_batch: as WorkerLoader has them.
    transform: `transform(batch, random)`, called once per batch on the device; see Preloader.
    collate_fn: makes a batch from a list of samples; by default torch's default_collate.
    sampler, batch_sampler, steps_per_epoch: as WorkerLoader has them. An iterable dataset can be read by `workers`,
        `prefetch`, and `torch`, which cannot resume it. `shuffle` then stands for `config.shuffle_buffer`.

    Raises LoaderConfigError for a combination that cannot work, RuntimeError for a device that does not exist.
    """
    is_stream = isinstance(dataset, IterableDataset)
    shuffle_buffer = config.shuffle_buffer if shuffle else 0
    shuffle = shuffle and not is_stream
    if (is_stream and config.name not in ("workers", "prefetch", "torch")) or not (
        is_stream or hasattr(dataset, "__len__")
    ):
        raise LoaderConfigError(
            f"loader={config.name} needs a map-style dataset, and {type(dataset).__name__} is not one: "
            "give it __len__ and __getitem__, or make it an IterableDataset and use loader=prefetch, workers or torch"
        )
    device = checked_device(device)
    order: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "seed": seed,
        "drop_last": drop_last,
        "last_batch": last_batch,
        "rank": rank,
        "world_size": world_size,
        "pad": pad,
        "sampler": sampler,
        "batch_sampler": batch_sampler,
    }
    if batch_sampler is not None:
        order |= {"batch_size": 1, "last_batch": None, "rank": 0, "world_size": 1}  # it gives this rank's batches
    if config.name == "resident":
        if collate_fn is not None:
            raise LoaderConfigError("loader=resident takes no collate_fn, as it keeps samples as arrays: use prefetch")
        return Preloader(ResidentLoader(dataset, device=device, **order), device, config.preload_depth, transform)
    reading: dict[str, Any] = {
        "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor,
        "timeout": config.timeout,
        "pin_memory": device.type not in ("cpu", "mps", "meta"),
        "collate_fn": collate_fn,
    }
    loader: Any
    if config.name == "torch":
        stock = {"num_workers": available_cores(), "prefetch_factor": 2}
        reading |= {key: value for key, value in stock.items() if reading[key] == "auto"}
        has_workers = reading["num_workers"] > 0
        if is_stream:
            if world_size > 1:
                raise LoaderConfigError(
                    f"loader=torch gives each of {world_size} processes the whole stream: use workers"
                )
            reading |= {"persistent_workers": True} if has_workers else {"prefetch_factor": None}
            drop_last, _ = checked_last_batch(last_batch, drop_last)
            loader = TorchStream(dataset, batch_size, seed, steps_per_epoch, drop_last=drop_last, **reading)
        else:
            loader = TorchLoader(dataset, **order, **reading)
    else:
        try:
            loader = WorkerLoader(
                dataset,
                persistent_workers=True,
                worker_method="thread" if config.name == "threads" else "multiprocessing",
                on_error=config.on_error,
                streams=config.streams,
                shuffle_buffer=shuffle_buffer,
                steps_per_epoch=steps_per_epoch,
                **order,
                **reading,
            )
        except ValueError as error:
            raise LoaderConfigError(str(error)) from error
        has_workers = has_pool(loader)
    depth = config.preload_depth
    if (has_workers and device.type == "cpu") or (is_stream and not has_workers):  # such a stream needs this thread
        depth = 0
    preloader = Preloader(loader, device, depth, transform)
    is_training = shuffle or sampler is not None or batch_sampler is not None
    if config.name == "cached" and is_training:  # an evaluation needs every sample
        return Preloader(CachedLoader(preloader, **order), device, 0)
    return preloader
