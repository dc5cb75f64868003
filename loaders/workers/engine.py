"""Builds the engine behind a WorkerLoader, and runs its epochs: in our own way with a seed, else in torch's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..background import default_context
from ..base import INTERRUPTED, Delivery, EpochIterator, Position
from ..randomness import fold
from .dispatcher import SPARE_SLOTS, Dispatcher
from .inline_pool import InlinePool
from .pool import Pool
from .reader import Reader, batch_bytes, spec_of
from .slots import SlotRing
from .tasks import OwnTasks, Tasks, unseeded_task
from .thread_pool import ThreadPool

Loader = Any  # a WorkerLoader, which imports this file


def build_engine(loader: Loader, batched: bool, has_pool: bool, base_seed: int | None) -> Dispatcher:
    """Builds the engine that the loader's arguments describe, and starts its workers.

    `batched`: a task is a batch of indices. Without `has_pool`, the calling thread reads. Worker i of a process pool
    starts with the seed `base_seed` + i; by default `base_seed` is computed from the loader's seed.
    """
    spec = spec_of(loader.dataset) if loader.seed is not None and batched else None
    skips = loader.on_error == "skip"
    reader = Reader(loader.dataset, loader.collate_fn, batched, loader.seed, spec, skips)
    depth = 0
    if has_pool:
        depth = loader.prefetch_batches or max(1, (loader.prefetch_factor or 0) * loader.num_workers)
    processes = loader.num_workers if has_pool and loader.worker_method == "multiprocessing" else 0
    page_locked = loader.pin_memory and loader.holds_batches_until_copied and torch.cuda.is_available()
    ring = SlotRing(depth + SPARE_SLOTS if has_pool else 0, processes, page_locked)
    if spec is not None:
        ring.fit(batch_bytes(spec, loader.batch_size or 1))
    pool: Pool
    if processes:
        from .process_pool import ProcessPool  # needs Linux

        if base_seed is None:
            base_seed = int(fold(loader.seed or 0, loader.rank) >> np.uint64(2))
        context = loader.multiprocessing_context or default_context()
        assert ring.fd is not None
        pool = ProcessPool(reader, processes, context, base_seed, loader.worker_init_fn, ring.fd, loader.timeout)
    elif has_pool:
        pool = ThreadPool(reader, loader.num_workers, loader.worker_init_fn, loader.timeout)
    else:
        pool = InlinePool(reader)
    return Dispatcher(
        pool,
        ring,
        depth,
        round_robin=loader.seed is None and loader.in_order,
        in_order=loader.in_order,
        max_restarts=loader.max_restarts,
        skips=skips,
    )


class EpochRunner:
    """Runs the epochs of a seeded loader: all on one engine if workers persist (`is_shared`), else each on its own.

    `reads_ahead`: the first batches of the next epoch are loaded while this one ends. Only our own order is read
    ahead: a user may change a sampler between epochs.
    """

    def __init__(self, tasks: Tasks, is_shared: bool, reads_ahead: bool) -> None:
        self.tasks = tasks
        self.engine: Dispatcher | None = None  # the shared one
        self.is_shared = is_shared
        self._reads_ahead = reads_ahead and is_shared

    def open(self, build: Callable[[], Dispatcher], epoch: int, first: int, afresh: bool = False) -> Dispatcher:
        """Returns an engine that delivers the epoch from batch `first` on; `afresh`: drop what was loaded ahead."""
        engine = self.engine
        if engine is not None:
            engine.check_process()
            if engine.is_interrupted:
                engine.close()
                engine = self.engine = None
        if engine is None:
            engine = build()
        if self.is_shared:
            self.engine = engine
        if not (self._reads_ahead and isinstance(self.tasks, OwnTasks)):
            engine.begin(self.tasks.epoch(epoch, first))
        elif afresh or not engine.continues_with(epoch, first):
            engine.begin(self.tasks.onwards(epoch, first))
        return engine

    def release(self, engine: Dispatcher) -> None:
        """Is called at the end of an epoch: closes its engine unless later epochs share it."""
        if engine is not self.engine:
            engine.close()

    def close(self) -> None:
        """Closes the shared engine; the next epoch builds a new one."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "engine": None}


class EpochSource:
    """The batches of an epoch of a seeded loader. It keeps the loader alive."""

    def __init__(self, loader: Loader, runner: EpochRunner, position: Position) -> None:
        self._loader, self._runner, self._position = loader, runner, position
        self.engine = runner.open(loader.build_engine, position.epoch, position.batch)

    @property
    def processes(self) -> list[Any]:
        return self.engine.processes

    def next(self) -> Delivery | None:
        # An exception from a signal handler, which can come anywhere, may have lost a delivery or broken the engine.
        if self.engine.is_interrupted or self.engine.deliveries != self._position.received:
            self._restart()
        delivery = self.engine.next(self._position.epoch)
        if delivery is None or delivery.error is not None or not self._loader.pins_batches:
            return delivery
        return delivery._replace(batch=pin_memory(delivery.batch))

    def close(self) -> None:
        self._runner.release(self.engine)

    def _restart(self) -> None:
        """Continues with the batch after the last one that the consumer received."""
        self._runner.release(self.engine)
        if not self._loader.in_order:
            raise RuntimeError(INTERRUPTED)
        epoch, first = self._position.epoch, self._position.batch
        self.engine = self._runner.open(self._loader.build_engine, epoch, first, afresh=True)
        self._position.received = 0


class SeededIterator(EpochIterator):
    """The iterator over one epoch of a seeded loader."""

    _source: EpochSource | None

    @property
    def engine(self) -> Dispatcher | None:
        return None if self._source is None else self._source.engine


class UnseededIterator(_BaseDataLoaderIter):
    """Behaves exactly as torch's iterator over worker processes, on our engine."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self.engine: Dispatcher = loader.build_engine(int(self._base_seed))
        self._is_ended = False
        self._reset(loader, first_iter=True)

    @property
    def _workers(self) -> list[Any]:
        return self.engine.processes

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self.engine.check_process()
        if self.engine.is_interrupted:
            self.engine.close()
            self.engine = loader.build_engine(int(self._base_seed))
        self._received = 0  # batches and errors
        self._pins = loader.pins_batches
        self.engine.begin(map(unseeded_task, self._sampler_iter))

    def __next__(self) -> Any:
        if self._is_ended:
            raise RuntimeError("this WorkerLoader is closed: make a new one")
        if self.engine.deliveries != self._received:  # an exception lost one between the engine and the consumer
            raise RuntimeError(INTERRUPTED)
        with record_function(self._profile_name):
            delivery = self.engine.next()
        if delivery is None:
            if not self._persistent_workers:
                self.engine.close()
            raise StopIteration
        _, batch, error = delivery
        if error is not None:
            self._received += 1
            try:
                raise error
            finally:  # else the error and this frame, which its traceback refers to, would keep each other alive
                del error, delivery
        if self._pins:
            batch = pin_memory(batch)
        self._num_yielded += 1
        self._received += 1  # last, as in EpochIterator
        return batch

    def end(self) -> None:
        self._is_ended = True
        self.engine.close()
