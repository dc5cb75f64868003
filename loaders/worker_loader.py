"""torch's DataLoader with another engine: workers write batches into shared memory, and they come out in order.

Without a seed it behaves exactly as torch's: order, random numbers, round robin, iterators, error messages. With a
seed, order and random numbers are pure functions of (seed, epoch, position, index). So batches have the same bytes
whatever the number of workers, a resume is exact, and the next epoch's first batches are loaded ahead.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from .base import (
    Epochs,
    OptionalMethods,
    Position,
    check_choice,
    checked_last_batch,
    missing_attribute,
)
from .order import Order, checked_seed
from .samplers import OrderBatchSampler, OrderSampler, length_of, own_generator_of, pass_on_epoch
from .workers.dispatcher import Dispatcher
from .workers.engine import EpochRunner, EpochSource, SeededIterator, UnseededIterator, build_engine
from .workers.tasks import BatchSamplerTasks, OwnTasks, SamplerTasks, Tasks

HAS_PROCESSES = sys.platform == "linux"  # elsewhere torch's own workers serve, or with a seed none

log = logging.getLogger(__name__)
T_co = TypeVar("T_co", covariant=True)

WORKER_METHODS = ("multiprocessing", "thread")


class SeededMethods(OptionalMethods):
    """The extra methods of a WorkerLoader with a seed: its order is known, and can be resumed."""

    def set_epoch(self: Any, epoch: int) -> None:
        """Sets the epoch that the next `iter()` runs; also calls `set_epoch` of your sampler, if it has one."""
        self._epochs.set_epoch(epoch)
        pass_on_epoch(epoch, self.batch_sampler, self.sampler)

    def state_dict(self: Any) -> dict[str, Any]:
        """Returns the position in the newest epoch, counted in samples delivered to all ranks: plain JSON.

        Raises ValueError where an epoch cannot be resumed: in_order=False, or a sampler with its own generator.
        """
        if not self.in_order:
            raise ValueError("in_order=False has no state: what was delivered is not a prefix of the epoch")
        generator = own_generator_of(self.batch_sampler, self.sampler)
        if generator is not None:
            raise ValueError(
                f"{generator} is a random generator, and the loader cannot save its state: leave it out (the loader "
                "then seeds the global generators while it draws from the sampler), or use the loader's shuffle=True"
            )
        state: dict[str, Any] = self._epochs.state_dict()
        return state

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        """Sets what the next `iter()` runs. Raises ValueError for a state of another seed, length, batch or order."""
        self._follow_length()
        self._epochs.load_state_dict(state)
        self._end_epoch()


class WorkerLoader(DataLoader[T_co]):
    """Batches of a map-style dataset, on the host; takes torch's arguments, and:

    seed: None for torch's behaviour, an int for ours; not together with `generator`.
    rank, world_size, pad: this process's share of each global batch (see loaders.order.Order); with a seed.
    last_batch: "keep" or "drop" in place of drop_last, or "rollover": samples left over at the end of an epoch begin
        the next one's first batch, so every batch is full (see Order); needs a seed and the loader's own order.
    prefetch_batches: batches loaded ahead in all, in place of prefetch_factor, which counts each worker's.
    worker_method: "multiprocessing", or "thread" for datasets whose work releases the GIL, or waits.
    on_error: "raise", or "skip" to leave out samples that cannot be read: a batch is then shorter, the log says why.
    max_restarts: how often in a row a batch is retried, after the worker that read it died or hung.

    With a seed it also has `set_epoch`, `state_dict` and `load_state_dict`: see SeededMethods. And a dataset may offer
    `sample_spec()` and `read_batch(indices, out, random)`, which writes into the batch itself: `out` has a tensor
    (len(indices), *shape) for each field of the spec, `random` is a loaders.Random with a stream per row. Batches lie
    in shared memory, which is reused when the last tensor in it has died; a batch that you keep never changes.

    Raises what DataLoader raises, and ValueError for arguments that contradict the above.
    """

    # Set by a consumer that holds each batch until its copies to the GPU are done, as Preloader does: with
    # pin_memory=True it gets page-locked slots. Other consumers get batches in torch's own pinned memory, which torch
    # does not reuse while a copy from it is under way.
    holds_batches_until_copied = False

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
        last_batch: str | None = None,
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
            raise ValueError("on_error='skip' needs a map-style dataset: an iterable one ends at its first error")
        # Libraries that rebuild a loader pass its prefetch_factor on: 2 if the argument was left out.
        if prefetch_batches is not None and (prefetch_factor not in (None, 2) or prefetch_batches < 1):
            raise ValueError(
                f"prefetch_batches={prefetch_batches}: give the number of batches to load ahead in all, from 1, "
                "and leave out prefetch_factor, which counts each worker's"
            )
        rollover = checked_last_batch(last_batch, drop_last) == "rollover"
        if rollover and (seed is None or sampler is not None or batch_sampler is not None):
            raise ValueError(
                "last_batch='rollover' needs a seed and the loader's own order: give seed=0, or another integer, and "
                "leave out sampler and batch_sampler"
            )
        drop_last = drop_last or last_batch == "drop"
        own_order, one_at_a_time = None, persistent_workers
        if seed is not None:
            if generator is not None:
                raise ValueError(f"seed={seed} and a generator were given: with a seed, leave out the generator")
            if isinstance(dataset, IterableDataset):
                raise ValueError(f"seed={seed} needs a map-style dataset: an iterable one has its own order")
            seed = checked_seed(seed)
            if num_workers == 0:  # arguments that only concern workers are ignored
                prefetch_factor, persistent_workers, multiprocessing_context, timeout = None, False, None, 0
            if sampler is None and batch_sampler is None:
                parts = drop_last, rank, world_size, pad, rollover
                own_order = Order(len(dataset), batch_size or 1, bool(shuffle), seed, *parts)
                shuffle, sampler = None, OrderSampler(own_order)
        elif (rank, world_size) != (0, 1):
            raise ValueError(
                f"rank={rank} and world_size={world_size} need a seed, from which all ranks compute the same order"
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
        SeededMethods.give(self, seed is not None)
        self.seed, self.rank, self.world_size, self.pad = seed, rank, world_size, pad
        self.last_batch = last_batch
        self.prefetch_batches, self.worker_method = prefetch_batches, worker_method
        self.on_error, self.max_restarts = on_error, max_restarts
        self._closed = False
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()  # that are running
        self._newest: Callable[[], Any] = _nothing  # a weak reference to the newest iterator
        self._current: Any = None  # the iterator behind next(loader)
        if seed is not None:
            tasks, kind = self._choose_tasks(own_order, seed)
            self._epochs = Epochs(tasks.order, kind)
            self._runner = EpochRunner(tasks, one_at_a_time, in_order and self._has_pool())
            if own_order is not None and batch_size is not None:  # past torch, which forbids to set it
                vars(self)["batch_sampler"] = OrderBatchSampler(self.sampler, batch_size, drop_last)

    def __len__(self) -> int:
        """Batches of the epoch that the next `iter()` runs, on this rank."""
        if self.seed is None:
            return super().__len__()
        if (length := self._epoch_length(self._epochs.upcoming()[0])) is None:
            raise TypeError("the sampler has no length, so the loader has none either")
        return length

    def __iter__(self) -> Any:
        if self._closed:
            raise RuntimeError("this WorkerLoader is closed: make a new one")
        self._current = None
        iterator = super().__iter__() if self.seed is None else self._begin_epoch()
        self._iterators.add(iterator)
        self._newest = weakref.ref(iterator)
        return iterator

    def __next__(self) -> Any:
        """Returns the next batch of the newest iterator, or of a new one if that is at its end."""
        newest = self._newest()
        current = newest if self._current is None else self._current
        if newest is None:
            current = iter(self)
        try:
            return next(current)
        except StopIteration:
            current, self._newest = None, _nothing
            raise
        finally:
            self._current = current  # a subclass's own, perhaps, around the newest

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(self, name)

    def stats(self) -> dict[str, Any]:
        """Returns {"workers": totals}, see loaders.workers.stats; empty before the first epoch and after close().

        The totals last as long as the workers: without persistent_workers, as long as the epoch's iterator.
        """
        shared = None if self.seed is None else self._runner.engine
        engine = shared or getattr(self._newest(), "engine", None)
        return {} if engine is None else {"workers": engine.stats.as_dict()}

    def close(self) -> None:
        """Ends the workers and all iterators; delivered batches stay valid. May be called repeatedly, in any state."""
        self._closed = True
        for iterator in list(self._iterators):
            getattr(iterator, "end", _nothing)()
        if self.seed is not None:
            self._runner.close()
        self._iterator = self._current = None
        self._newest = _nothing

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled: all but the workers and iterators."""
        running = ("_iterators", "_newest", "_current")
        return {**{name: value for name, value in vars(self).items() if name not in running}, "_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._iterators, self._newest, self._current = weakref.WeakSet(), _nothing, None
        if self.seed is not None:  # copy.copy() gives those of the other loader, which runs its own epochs on them
            self._epochs, self._runner = copy(self._epochs), copy(self._runner)

    def __enter__(self) -> WorkerLoader[T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose_tasks(self, own_order: Order | None, seed: int) -> tuple[Tasks, str]:
        """Returns the tasks of a seeded loader, and the name of what decides their order."""
        if own_order is not None:
            return OwnTasks(own_order, self._auto_collation), own_order.kind
        gives_batches = self.batch_size is None
        if gives_batches and self.world_size > 1:
            raise ValueError("world_size > 1 splits batches of batch_size: it cannot be used with a batch_sampler")
        sampler = self._index_sampler if gives_batches else self.sampler
        parts = self.drop_last, self.rank, self.world_size, self.pad
        order = Order(length_of(sampler), self.batch_size or 1, False, seed, *parts)
        if gives_batches:
            return BatchSamplerTasks(sampler, order, self._auto_collation), "batch_sampler"
        return SamplerTasks(sampler, order), "sampler"

    def _get_iterator(self) -> Any:
        """Returns an iterator of a loader without a seed; torch's `__iter__` calls this."""
        if isinstance(self.dataset, IterableDataset) or (self.num_workers > 0 and not self._has_pool()):
            if self.num_workers > 0:
                _warn_once("torch's own workers read iterable datasets, and on systems other than Linux all datasets")
            return super()._get_iterator()
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return UnseededIterator(self)

    def _has_pool(self) -> bool:
        return self.num_workers > 0 and (HAS_PROCESSES or self.worker_method == "thread")

    def _begin_epoch(self) -> SeededIterator:
        self._end_epoch()
        self._follow_length()
        if self.num_workers > 0 and not self._has_pool():
            _warn_once(
                "worker processes need Linux: samples are read in the calling process; worker_method='thread' reads "
                "them in threads"
            )
        position = Position(*self._epochs.upcoming())
        source = EpochSource(self, self._runner, position)
        self._epochs.begin(position)
        return SeededIterator(source, position, self._epoch_length(position.epoch))

    def _epoch_length(self, epoch: int) -> int | None:
        length = self._samples_per_epoch()
        return None if length == sys.maxsize else replace(self._epochs.order, length=length).batches_in(epoch)

    def _samples_per_epoch(self) -> int:
        """Returns the length that the dataset or the sampler has now."""
        tasks = self._runner.tasks
        if isinstance(tasks, SamplerTasks | BatchSamplerTasks):
            return length_of(tasks.sampler)
        return len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset lacks __len__

    def _follow_length(self) -> None:
        """Takes up a length that the dataset, or the sampler, has grown or shrunk to, as torch does."""
        order, length = self._epochs.order, self._samples_per_epoch()
        if length == order.length:
            return
        self._end_epoch()
        self._runner.tasks.order = self._epochs.order = replace(order, length=length)
        if not isinstance(self.sampler, OrderSampler) or not isinstance(self._runner.tasks, OwnTasks):
            return
        log.warning(
            "%s had %d samples and has %d now: this epoch uses the new length, and the workers are restarted",
            type(self.dataset).__name__,
            order.length,
            length,
        )
        self.sampler.order = self._epochs.order
        self._runner.close()

    def _end_epoch(self) -> None:
        """Ends the newest iterator, unless it has an engine of its own."""
        newest = self._newest()
        if newest is not None and self._runner.is_shared:
            newest.end()
        self._current, self._newest = None, _nothing

    def build_engine(self, base_seed: int | None = None) -> Dispatcher:
        """Builds an engine for the loader's epochs; worker i begins with the seed `base_seed` + i."""
        return build_engine(self, self._auto_collation, self._has_pool(), base_seed)

    @property
    def pins_batches(self) -> bool:
        """Whether batches are copied into torch's pinned memory: it is asked for, and there is a device for it."""
        return self.pin_memory and not self.holds_batches_until_copied and torch.cuda.is_available()


def _nothing() -> None:
    """Returns None, as a weak reference does when its object is gone."""


@cache
def _warn_once(sentence: str) -> None:
    log.warning(sentence)
