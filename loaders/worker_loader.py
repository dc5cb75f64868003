"""torch's DataLoader with another engine: workers write batches into shared memory, and they come out in order.

Without a seed it is torch's to the letter: order, random numbers, round robin, iterators, error texts. With a seed,
order and random numbers are pure functions of (seed, epoch, position, index): the same bytes whatever the number of
workers, exact resume, and the next epoch's first batches loaded ahead.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from loaders.choices import check_choice
from loaders.dispatch import LEASES, Dispatcher
from loaders.order import Order
from loaders.pools.inline import Inline
from loaders.pools.thread import ThreadPool
from loaders.progress import Progress
from loaders.randomness import fold
from loaders.reading import Reader, Task, batch_bytes, spec_of
from loaders.slots import SlotRing
from loaders.stream import OwnOrder, TaskStream

HAS_PROCESSES = sys.platform == "linux"  # memfd and pidfd; elsewhere torch's own workers serve, or with a seed none
if HAS_PROCESSES:
    from loaders.pools.process import ProcessPool

log = logging.getLogger(__name__)
T_co = TypeVar("T_co", covariant=True)

WORKER_METHODS = ("multiprocessing", "thread")


class WorkerLoader(DataLoader[T_co]):
    """Batches of a map-style dataset, on the host; takes torch's arguments, and:

    seed: None for torch's behaviour, an int for ours; it excludes `generator`.
    rank, world_size, pad: this process's share of each global batch (see loaders.order.Order); with a seed.
    prefetch_batches: batches loaded ahead in all, in place of prefetch_factor, which is each worker's share.
    worker_method: "multiprocessing", or "thread" for datasets whose work releases the GIL, or waits.
    on_error: "raise", or "skip" to leave out samples that cannot be read: a batch is then shorter, the log says why.
    max_restarts: how many times in a row a worker that died or hung at a batch is replaced, and the batch read again.

    With a seed, a dataset may offer `sample_spec()` and `read_batch(indices, out, random)`, which writes into the
    batch itself: `out` has a tensor (len(indices), *shape) for each field of the spec, `random` is a
    loaders.randomness.Random with a stream a row. Batches lie in shared memory that is used again when the last tensor
    on it has died; one that is kept stays as it is for ever.

    Raises what DataLoader raises, and ValueError for what goes against the above.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        pad: bool = True,
        prefetch_batches: int | None = None,
        worker_method: str = "multiprocessing",
        on_error: str = "raise",
        max_restarts: int = 3,
    ) -> None:
        check_choice("worker_method", worker_method, WORKER_METHODS)
        check_choice("on_error", on_error, ("raise", "skip"))
        if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
            raise ValueError(f"max_restarts={max_restarts!r}: give a number from 0")
        if not math.isfinite(timeout):
            raise ValueError(f"timeout={timeout}: give a number of seconds, or 0 to wait for ever")
        if worker_method == "thread" and multiprocessing_context is not None:
            raise ValueError("worker_method='thread' starts no processes: leave out multiprocessing_context")
        if on_error == "skip" and isinstance(dataset, IterableDataset):
            raise ValueError("on_error='skip' needs a map-style dataset: an iterable one cannot go on after an error")
        if prefetch_batches is not None and (prefetch_factor is not None or prefetch_batches < 1):
            raise ValueError(
                f"prefetch_batches={prefetch_batches}: give the number of batches to load ahead in all, from 1, "
                "and leave out prefetch_factor, which counts each worker's"
            )
        if seed is not None:
            if generator is not None:
                raise ValueError(f"seed={seed} and a generator were given: with a seed nothing draws from a generator")
            if isinstance(dataset, IterableDataset):
                raise ValueError(f"seed={seed} needs a map-style dataset: an iterable one has an order of its own")
            self._one_at_a_time = persistent_workers
            if num_workers == 0:  # what concerns only workers is ignored
                prefetch_factor, persistent_workers, multiprocessing_context, timeout = None, False, None, 0
            if sampler is None and batch_sampler is None:
                order = Order(len(dataset), batch_size or 1, bool(shuffle), seed, drop_last, rank, world_size, pad)
                shuffle, sampler = None, OwnOrder(order)
        elif (rank, world_size) != (0, 1):
            raise ValueError(
                f"rank={rank} and world_size={world_size} need a seed, from which all ranks get one order"
            )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.seed, self.rank, self.world_size, self.pad = seed, rank, world_size, pad
        self.prefetch_batches, self.worker_method = prefetch_batches, worker_method
        self.on_error, self.max_restarts = on_error, max_restarts
        self._closed = False
        self._source: Dispatcher | Inline | None = None  # of persistent workers with a seed
        self._newest: Callable[[], Any] = _nothing  # a weak reference to the newest iterator
        self._current: Any = None  # the iterator behind next(loader)
        if seed is not None:
            self._stream = TaskStream(self)
            self._progress = Progress(self._stream.order)
            if isinstance(sampler, OwnOrder):
                sampler.progress = self._progress

    def __len__(self) -> int:
        """Batches an epoch, of this rank."""
        return super().__len__() if self.seed is None else len(self._stream.order)

    def __iter__(self) -> Any:
        if self._closed:
            raise RuntimeError("this WorkerLoader is closed: make a new one")
        self._current = None
        iterator = super().__iter__() if self.seed is None else self._begin_epoch()
        self._newest = weakref.ref(iterator)
        return iterator

    def __next__(self) -> Any:
        """Goes on with the newest iterator, or with a new one where that is at its end."""
        self._current = self._newest() or iter(self)
        try:
            return next(self._current)
        except StopIteration:
            self._current, self._newest = None, _nothing
            raise

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch that the next `iter()` runs."""
        self._needs_seed("set_epoch")
        self._progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the newest epoch stands, counted in global samples delivered: plain JSON."""
        self._needs_seed("state_dict")
        if not self.in_order:
            raise ValueError("in_order=False has no state to resume from: what was delivered is not a first part")
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what the next `iter()` runs. Raises ValueError for a state of another seed, length or global batch."""
        self._needs_seed("load_state_dict")
        self._progress.load_state_dict(state)
        self._end_epoch()

    def stats(self) -> dict[str, Any]:
        """{"workers": totals since the start} (loaders.stats.Stats); empty without our workers and after close()."""
        source = self._source or getattr(self._newest(), "source", None)
        return {} if source is None else {"workers": source.stats.as_dict()}

    def close(self) -> None:
        """Ends workers and epochs; batches that were delivered stay valid. Idempotent, in any state."""
        self._closed = True
        owners = self._source, self._newest()
        self._end_epoch()
        for owner in owners:
            if hasattr(owner, "close"):
                owner.close()
        self._source = self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a loader that is pickled: without its workers and iterators."""
        return {**self.__dict__, "_source": None, "_newest": _nothing, "_current": None, "_iterator": None}

    def __enter__(self) -> WorkerLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _needs_seed(self, method: str) -> None:
        if self.seed is None:
            raise ValueError(
                f"{method}() needs a seed: without one the order is torch's, and cannot be taken up again"
            )

    def _get_iterator(self) -> Any:
        """torch asks this for an iterator where there is no seed."""
        iterable = isinstance(self.dataset, IterableDataset)
        if iterable or not (self._has_pool() or self.on_error == "skip"):
            if self.num_workers > 0:
                _say_once("iterable datasets, and systems other than Linux, are left to torch's own workers")
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return _TorchEpoch(self)

    def _has_pool(self) -> bool:
        return self.num_workers > 0 and (HAS_PROCESSES or self.worker_method == "thread")

    def _begin_epoch(self) -> _Epoch:
        self._end_epoch()
        source = self._source or self._make_source()
        epoch, first = self._progress.begin()
        if not self._one_at_a_time:
            source.begin(self._stream.tasks(epoch, first))
            return _Epoch(self, source, epoch)
        self._source = source
        head = source.head()
        if head is None or (head.epoch, head.number) != (epoch, first):
            # Out of order, batches of the next epoch would come out in this one.
            tasks = self._stream.onwards if self.in_order else self._stream.tasks
            source.begin(tasks(epoch, first))
        return _Epoch(self, source, epoch)

    def _end_epoch(self) -> None:
        """Ends the newest iterator, unless it is independent of the next one."""
        newest = self._newest()
        if isinstance(newest, _Epoch) and (newest.source is self._source or self._closed):
            newest.end()
        self._current, self._newest = None, _nothing

    def _make_source(self, base_seed: int | None = None) -> Dispatcher | Inline:
        spec = None
        if self.seed is not None and self._auto_collation and hasattr(self.dataset, "read_batch"):
            spec = spec_of(self.dataset)
        skips = self.on_error == "skip"
        reader = Reader(self.dataset, self.collate_fn, self._auto_collation, self.seed, spec, skips)
        if not self._has_pool():
            return Inline(reader)
        processes = self.num_workers if self.worker_method == "multiprocessing" else 0
        depth = self.prefetch_batches or max(1, self.prefetch_factor * self.num_workers)
        ring = SlotRing(depth + LEASES, processes, self.pin_memory and torch.cuda.is_available())
        if spec is not None:
            ring.fit(batch_bytes(spec, self.batch_size or 1))
        if base_seed is None:
            base_seed = int(fold(self.seed, self.rank) >> np.uint64(2))
        if processes:
            context = self.multiprocessing_context or torch.multiprocessing.get_context("fork")
            pool = ProcessPool(reader, processes, context, base_seed, self.worker_init_fn, ring.fd)
        else:
            pool = ThreadPool(reader, self.num_workers, self.worker_init_fn)
        return Dispatcher(
            pool,
            ring,
            depth,
            round_robin=self.seed is None and self.in_order,
            in_order=self.in_order,
            timeout=self.timeout,
            max_restarts=self.max_restarts,
            skips=skips,
        )


class _Epoch:
    """An epoch of a seeded loader, as its consumer holds it."""

    def __init__(self, loader: WorkerLoader, source: Dispatcher | Inline, epoch: int) -> None:
        self.source: Dispatcher | Inline | None = source
        self._loader, self._epoch = loader, epoch
        self._finished = False

    def __iter__(self) -> _Epoch:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def _workers(self) -> list[Any]:
        return [] if self.source is None else self.source.processes

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        if self.source is None:
            raise RuntimeError("this epoch was ended by a newer iter(), by load_state_dict() or by close()")
        newest = self._loader._newest() is self
        head = self.source.head()
        if head is None or head.epoch != self._epoch:
            self._finished = True
            if newest:
                self._loader._progress.finish()
            self.end()
            raise StopIteration
        before = self.source.stats.batches
        try:
            batch = self.source.next()
        finally:
            # A batch that failed counts, so that those after it keep their place; a timeout is none.
            if newest and self.source is not None and self.source.stats.batches > before:
                self._loader._progress.delivered()
        return _pinned(batch) if self._loader.pin_memory else batch

    def end(self) -> None:
        if self.source is not None and self.source is not self._loader._source:
            self.source.close()
        self.source = None


class _TorchEpoch(_BaseDataLoaderIter):
    """torch's iterator over worker processes, to the letter, on our engine."""

    def __init__(self, loader: WorkerLoader) -> None:
        super().__init__(loader)
        self.source, self._closed = loader._make_source(self._base_seed), False
        self._workers = self.source.processes
        self._reset(loader, first_iter=True)

    def _reset(self, loader: WorkerLoader, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self.source.begin(map(Task, self._sampler_iter))

    def _next_data(self) -> Any:
        if self._closed:
            raise RuntimeError("this WorkerLoader is closed: make a new one")
        if self.source.head() is None:
            if not self._persistent_workers:
                self.source.close()
            raise StopIteration
        batch = self.source.next()
        return _pinned(batch) if self._pin_memory else batch

    def close(self) -> None:
        self._closed = True
        self.source.close()


def _nothing() -> None:
    """What a weak reference to nothing gives."""


def _pinned(batch: Any) -> Any:
    """The batch in page-locked memory, where there is a device to lock it for; a slot already is."""
    return pin_memory(batch) if torch.cuda.is_available() else batch


@cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)
