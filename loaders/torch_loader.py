"""The stock torch.utils.data.DataLoader with its best settings: the baseline that others are compared with.

A thin adapter: order, epochs and state are ours (through a batch sampler); fetching, workers, collating and pinning
are torch's. The global random generators are seeded once per batch from (seed, epoch, batch number, rank). So a
batch's bytes do not depend on the number of workers, and a resumed epoch continues with the same bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from .background import default_context
from .base import Delivery
from .epoch_loader import EpochLoader
from .randomness import fold, preserved_globals, seed_globals
from .timeline import Timeline, Work, WorkClock
from .workers.errors import pickled_error, raised_again
from .workers.reader import warn_of_unseeded_reading
from .workers.stats import Stats
from .workers.tasks import SamplerError, Task


class TorchLoader(EpochLoader):
    """Batches of a map-style dataset, on the host, as torch's default collate makes them.

    `iter()` ends the previous iterator. Workers are started once, and serve all epochs. The arguments mean what they
    mean in DataLoader and WorkerLoader.
    Raises what DataLoader raises; `next()` raises a dataset's error with the worker's traceback.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        timeout: float = 0,
        drop_last: bool = False,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
        pad: bool = True,
        last_batch: str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
    ) -> None:
        order = batch_size, shuffle, seed, drop_last, rank, world_size, pad, last_batch, sampler, batch_sampler
        super().__init__(dataset, *order)
        self._collate_fn = collate_fn or default_collate
        self._settings: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        if num_workers > 0:
            self._settings |= {"prefetch_factor": prefetch_factor, "persistent_workers": True, "timeout": timeout}
        self.timeline: Timeline | None = None  # records what the workers do; set it before an epoch
        self._stats = Stats(active_workers=max(1, num_workers))
        self._source: _TorchSource | None = None
        self._loader: DataLoader[Any] | None = self._stock_loader()

    def _stock_loader(self) -> DataLoader[Any]:
        self._batches = _KeyedBatches(self.seed, self.rank)
        self._reader = _SeededReader(self.dataset, self._collate_fn)
        return DataLoader(
            self._reader,
            batch_sampler=self._batches,  # type: ignore[arg-type]  # of more than indices
            collate_fn=self._reader,  # type: ignore[arg-type]
            generator=torch.Generator(),  # else DataLoader would draw from the global generator in every epoch
            multiprocessing_context=default_context() if self._settings["num_workers"] else None,
            **self._settings,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_loader": None, "_batches": None, "_source": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._loader = None if self._closed else self._stock_loader()

    def _open(self, epoch: int, first: int) -> _TorchSource:
        self._batches.tasks = self._epochs.tasks.epoch(epoch, first)
        self._reader.thread = threading.get_ident()
        assert self._loader is not None
        self._source = _TorchSource(iter(self._loader), self._batches, epoch, self._stats, self.timeline)
        return self._source

    def stats(self) -> dict[str, Any]:
        """Returns {"workers": totals}, see loaders.workers.stats; those that the stock loader does not show are 0."""
        return {"workers": self._stats.as_dict()}

    def close(self) -> None:
        """Stops the workers, also those that hang. May be called repeatedly, in any state."""
        super().close()
        iterator = getattr(self._loader, "_iterator", None)  # has the workers; torch has no public way to stop them
        if iterator is not None:
            if self._source is not None and self._source.is_waiting:
                for worker in iterator._workers:  # the waiting thread gets an error, and shuts the rest down
                    worker.terminate()
            else:  # ask them to exit: if a worker is killed while it holds a shared lock, this process hangs
                iterator._shutdown_workers()
        self._loader = None


class _TorchSource:
    """One epoch's batches. If it is closed while a thread waits in `next`, that thread shuts the workers down."""

    def __init__(
        self, batches: Any, sampling: _KeyedBatches, epoch: int, stats: Stats, timeline: Timeline | None
    ) -> None:
        self._batches, self._sampling, self._epoch = batches, sampling, epoch
        self._stats, self._timeline = stats, timeline
        self._fetched: list[Any] = []  # from `batches`, not made a delivery yet
        self._delivery: Delivery | None = None  # the newest
        self._closed = self._has_failed = False
        self.is_waiting = False  # a thread is inside next()

    def next(self) -> Delivery | None:
        if self._delivery is not None and not self._delivery.is_taken:
            return self._delivery
        self.is_waiting = True
        began = time.perf_counter()
        try:
            # One call fetches and keeps it, so that no exception comes in between.
            self._fetched.extend(islice(self._batches, 1 - len(self._fetched)))
        except Exception:
            self._has_failed = True
            if self._closed:
                self._batches._shutdown_workers()
            raise
        finally:
            self.is_waiting = False
        if not self._fetched and self._has_failed:  # torch's iterator stops here: the epoch is not over
            raise RuntimeError("torch's DataLoader stopped early, after an error: make a new loader")
        self._has_failed = False
        if not self._fetched:
            error = self._sampling.error
            self._delivery = Delivery(None, error=error) if error is not None else None
            self._sampling.error = None
            return self._delivery
        number, batch, error, worker, work = self._fetched[0]
        if isinstance(error, bytes):
            error = raised_again(error)
        self._stats.batches += 1
        self._stats.wait_seconds += time.perf_counter() - began
        self._stats.count_work(work)
        if self._timeline is not None:
            self._timeline.add_work(f"worker {worker}", work, self._epoch, number)
        delivery = Delivery(number, batch, error)
        del self._fetched[0]
        self._delivery = delivery
        return delivery

    def close(self) -> None:
        self._closed = True


class _Batch(NamedTuple):
    """A batch to read: its dataset indices, its number in the epoch, and the key of its random numbers."""

    indices: list[Any]
    number: int
    key: int


class _KeyedBatches:
    """A batch sampler for DataLoader: the batches of `tasks`."""

    def __init__(self, seed: int, rank: int) -> None:
        self._seed, self._rank = seed, rank
        self.tasks: Iterator[Task] = iter(())  # of the next epoch
        self.error: BaseException | None = None  # the sampler's, which comes after the batches before it

    def __iter__(self) -> Iterator[_Batch]:
        self.error = None
        try:
            for task in self.tasks:
                key = fold(self._seed, task.epoch or 0, task.number or 0, self._rank)
                yield _Batch(list(task.indices), task.number or 0, int(key))
        except SamplerError as error:
            self.error = error.__cause__


class _SeededReader(Dataset[Any]):
    """DataLoader's dataset and its collate_fn: reads a batch with the global generators seeded from the batch's key.

    An error is returned, not raised: so it has its batch's number.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate_fn = dataset, collate_fn
        self.thread: int | None = None  # the one that called iter(): the training loop's
        self._read_all = getattr(dataset, "__getitems__", None)
        self._clock = WorkClock()

    def __getitems__(self, batch: _Batch) -> _Batch:
        return batch

    def __call__(self, batch: _Batch) -> tuple[int, Any, Any, int, Work]:
        """Returns the batch's number, the batch, the error in its place, the worker, and how long that took."""
        info = get_worker_info()
        self._clock.begin()
        self._collating_from = time.perf_counter()
        data = error = None
        try:
            data = self._seeded(batch, info is not None)
        except Exception as raised:
            error = raised if info is None else pickled_error(f"in DataLoader worker process {info.id}")
        work = self._clock.end(time.perf_counter() - self._collating_from)
        return batch.number, data, error, 0 if info is None else info.id, work

    def _seeded(self, batch: _Batch, in_worker: bool) -> Any:
        if in_worker:
            seed_globals(batch.key)
            return self._read(batch)
        if threading.get_ident() == self.thread:
            with preserved_globals():  # the model's own draws must not change with the loader
                seed_globals(batch.key)
                return self._read(batch)
        warn_of_unseeded_reading()
        return self._read(batch)

    def _read(self, batch: _Batch) -> Any:
        if self._read_all is not None:
            samples = self._read_all(batch.indices)
        else:
            samples = [self._dataset[index] for index in batch.indices]
        self._collating_from = time.perf_counter()
        return self._collate_fn(samples)
