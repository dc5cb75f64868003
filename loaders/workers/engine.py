"""Builds the engine behind a WorkerLoader: a Dispatcher with its pool, reader and slots. epochs.py runs it."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

import numpy as np
import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset, dataloader
from torch.utils.data._utils import fetch
from torch.utils.data._utils import worker as torch_worker

from ..background import default_context
from ..machine import available_memory
from ..preload.accelerator import can_page_lock, can_pin_memory
from ..randomness import fold
from .added import Added
from .dispatcher import Dispatcher
from .inline_pool import InlinePool
from .pool import Pool
from .reader import Reader, batch_bytes, spec_of
from .slots import SlotRing
from .stream_dispatcher import StreamDispatcher
from .stream_reader import StreamReader, stream_reader
from .thread_pool import ThreadPool

log = logging.getLogger(__name__)

Loader = Any  # a WorkerLoader, which imports this file
HAS_PROCESSES = sys.platform == "linux"
MEMORY_SHARE = 8  # prefetch_factor="auto" loads ahead as many batches as fit into an eighth of the available memory
# Slots in addition to those of tasks in flight: for batches that the training loop and a preloader's queue hold. If
# these hold more batches than that, the next ones are delivered as copies.
SPARE_SLOTS = 8
UNKNOWN_MEMORY = 4 << 30  # bytes assumed to be available where the system does not tell


def has_pool(loader: Loader) -> bool:
    """Returns whether workers read the samples, and not the thread that calls next()."""
    reads_streams = isinstance(loader.dataset, IterableDataset)
    return loader.num_workers > 0 and (HAS_PROCESSES or (uses_threads(loader) and not reads_streams))


def uses_threads(loader: Loader) -> bool:
    """Returns whether the workers are threads: also with a seed where worker processes are not possible."""
    added: Added = loader._added
    return added.worker_method == "thread" or (added.seed is not None and not HAS_PROCESSES)


def pins_batches(loader: Loader) -> bool:
    """Returns whether `next()` copies batches into torch's pinned memory."""
    return loader.pin_memory and not loader.holds_batches_until_copied and can_pin_memory()


def replaced_part() -> str | None:
    """Returns the name of a part of torch's loader that the program has replaced, or None.

    Programs replace `__next__` of its iterators to see each batch, and `fetch` to make batches in another way.
    """
    kinds: list[Any] = [dataloader._BaseDataLoaderIter, dataloader._SingleProcessDataLoaderIter]
    kinds += [dataloader._MultiProcessingDataLoaderIter, dataloader._DatasetKind]
    kinds += [fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher]
    parts = [(f"{kind.__name__}.{name}", part) for kind in kinds for name, part in vars(kind).items()]
    parts += [("_worker_loop", torch_worker._worker_loop)]
    parts += [("DataLoader._get_iterator", DataLoader._get_iterator)]
    for name, part in parts:
        code = getattr(getattr(part, "__func__", part), "__code__", None)
        if callable(part) and (code is None or not code.co_filename.startswith(torch.utils.data.__path__[0])):
            return name
    return None


def build_engine(loader: Loader, base_seed: int | None = None) -> Dispatcher:
    """Builds the engine that the loader's arguments describe, and starts its workers.

    Worker process i starts with the seed `base_seed` + i; None: it is computed from the loader's seed.
    """
    added: Added = loader._added
    is_pool, batched = has_pool(loader), loader._auto_collation  # a subclass may override it
    spec = spec_of(loader.dataset) if added.seed is not None and batched else None
    skips, is_stream = added.on_error == "skip", isinstance(loader.dataset, IterableDataset)
    reader: Any = Reader(loader.dataset, loader.collate_fn, batched, added.seed, spec, skips)
    if is_stream:
        reader = stream_reader(loader)
    uses_processes = is_pool and not uses_threads(loader)
    page_locked = loader.pin_memory and loader.holds_batches_until_copied and can_page_lock()
    page_locked &= sys.platform == "linux"
    total, each = added.prefetch_batches, loader.prefetch_factor or 0
    memory = (available_memory() or UNKNOWN_MEMORY) // MEMORY_SHARE if added.bounds_memory else None
    most_ahead = total or max(1, each * loader.num_workers)
    ring = SlotRing(most_ahead + SPARE_SLOTS if is_pool else 0, uses_processes, page_locked)

    def depth(workers: int) -> int:
        ahead = total or max(1, each * workers)
        if memory is not None:  # while the size of a batch is unknown, one batch per worker
            ahead = max(workers, min(ahead, memory // ring.capacity if ring.capacity else 0))
        return ahead if is_pool else 0

    if spec is not None:
        ring.fit(batch_bytes(spec, loader.batch_size or 1))
    engine = (StreamDispatcher if is_stream else Dispatcher)(
        _build_pool(loader, reader, base_seed),
        ring,
        depth,
        round_robin=added.seed is None and loader.in_order,
        in_order=loader.in_order,
        max_restarts=0 if is_stream and added.seed is None else added.max_restarts,  # such a stream can't be replayed
        skips=skips and not is_stream,  # no sample of a stream can be passed over
        tuner=added.tuner if is_pool else None,
    )
    added.stats = engine.stats
    return engine


def _build_pool(loader: Loader, reader: Any, base_seed: int | None) -> Pool:
    added: Added = loader._added
    workers, init_fn, timeout = loader.num_workers, loader.worker_init_fn, loader.timeout
    if not has_pool(loader):
        return InlinePool(reader)
    if uses_threads(loader):
        if added.worker_method != "thread":
            warn_once("worker processes need Linux: threads read the samples, which share one interpreter's lock")
        return ThreadPool(reader, workers, init_fn, timeout)

    from .process_pool import ProcessPool  # needs Linux

    if base_seed is None:
        base_seed = int(fold(added.seed or 0, added.rank) >> np.uint64(2))
    if isinstance(reader, StreamReader) and added.seed is not None:  # which calls it for each stream
        workers, init_fn = min(workers, added.streams // added.world_size), None
    context = loader.multiprocessing_context or default_context()
    started = added.tuner.workers if added.tuner else workers
    return ProcessPool(reader, workers, context, base_seed, init_fn, timeout, started)


@cache
def warn_once(sentence: str) -> None:
    log.warning(sentence)
