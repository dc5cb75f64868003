"""Builds the engine behind a WorkerLoader: a Dispatcher with its pool, reader and slots. epochs.py runs it."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

import numpy as np

from ..background import default_context
from ..machine import available_memory
from ..preload.accelerator import can_page_lock
from ..randomness import fold
from .dispatcher import SPARE_SLOTS, Dispatcher
from .inline_pool import InlinePool
from .pool import Pool
from .reader import Reader, batch_bytes, spec_of
from .slots import SlotRing
from .thread_pool import ThreadPool

log = logging.getLogger(__name__)

Loader = Any  # a WorkerLoader, which imports this file
MEMORY_SHARE = 8  # prefetch_factor="auto" loads ahead as many batches as fit into an eighth of the available memory
UNKNOWN_MEMORY = 4 << 30  # bytes assumed to be available where the system does not tell


def build_engine(loader: Loader, base_seed: int | None) -> Dispatcher:
    """Builds the engine that the loader's arguments describe, and starts its workers.

    Worker process i starts with the seed `base_seed` + i; None: it is computed from the loader's seed.
    """
    has_pool, batched = loader.has_pool, loader.batch_sampler is not None
    spec = spec_of(loader.dataset) if loader.seed is not None and batched else None
    skips = loader.on_error == "skip"
    reader = Reader(loader.dataset, loader.collate_fn, batched, loader.seed, spec, skips)
    uses_processes = has_pool and not loader.uses_threads
    page_locked = loader.pin_memory and loader.holds_batches_until_copied and can_page_lock()
    page_locked &= sys.platform == "linux"
    total, each = loader.prefetch_batches, loader.prefetch_factor or 0
    memory = (available_memory() or UNKNOWN_MEMORY) // MEMORY_SHARE if loader.bounds_memory else None
    most_ahead = total or max(1, each * loader.num_workers)
    ring = SlotRing(most_ahead + SPARE_SLOTS if has_pool else 0, uses_processes, page_locked)

    def depth(workers: int) -> int:
        ahead = total or max(1, each * workers)
        if memory is not None:  # while the size of a batch is unknown, one batch per worker
            ahead = max(workers, min(ahead, memory // ring.capacity if ring.capacity else 0))
        return ahead if has_pool else 0

    if spec is not None:
        ring.fit(batch_bytes(spec, loader.batch_size or 1))
    return Dispatcher(
        _build_pool(loader, reader, base_seed),
        ring,
        depth,
        round_robin=loader.seed is None and loader.in_order,
        in_order=loader.in_order,
        max_restarts=loader.max_restarts,
        skips=skips,
        tuner=loader.tuner if has_pool else None,
        timeline=loader.timeline,
    )


def _build_pool(loader: Loader, reader: Reader, base_seed: int | None) -> Pool:
    workers, init_fn, timeout = loader.num_workers, loader.worker_init_fn, loader.timeout
    if not loader.has_pool:
        return InlinePool(reader)
    if loader.uses_threads:
        if loader.worker_method != "thread":
            warn_once("worker processes need Linux: threads read the samples, which share one interpreter's lock")
        return ThreadPool(reader, workers, init_fn, timeout)

    from .process_pool import ProcessPool  # needs Linux

    if base_seed is None:
        base_seed = int(fold(loader.seed or 0, loader.rank) >> np.uint64(2))
    context = loader.multiprocessing_context or default_context()
    started = loader.tuner.workers if loader.tuner else workers
    return ProcessPool(reader, workers, context, base_seed, init_fn, timeout, started)


@cache
def warn_once(sentence: str) -> None:
    log.warning(sentence)
