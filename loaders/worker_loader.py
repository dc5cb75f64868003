"""torch's DataLoader with another engine: workers write batches into shared memory, and they come out in order.

Without a seed it behaves exactly as torch's: order, random numbers, round robin, iterators, error messages. With a
seed, order and random numbers are pure functions of (seed, epoch, position, index). So batches have the same bytes
whatever the number of workers, a resume is exact, and the next epoch's first batches are loaded ahead.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from .arguments import check_arguments, checked_last_batch, checked_seed
from .base import Closeable, keep_out_of_compilation, missing_attribute
from .machine import available_cores
from .order import Order
from .preload.accelerator import can_pin_memory
from .samplers import OrderSampler, own_batch_sampler
from .timeline import Timeline
from .workers.autotune import Tuner
from .workers.dispatcher import Dispatcher
from .workers.engine import build_engine, warn_once
from .workers.epochs import EpochRunner, SeededMethods, UnseededIterator
from .workers.stats import Stats

HAS_PROCESSES = sys.platform == "linux"  # elsewhere torch's own workers read or, with a seed, threads

AUTO_PREFETCH_FACTOR = 4  # batches per worker: while one batch takes long, the other workers can go on

T_co = TypeVar("T_co", covariant=True)


class WorkerLoader(DataLoader[T_co], Closeable):
    """Batches of a map-style dataset, on the host; takes torch's arguments, and:

    seed: None for torch's behaviour, an int for ours; not together with `generator`.
    rank, world_size, pad: which part of each global batch this process gets (see loaders.order.Order); need a seed.
    last_batch: "keep" or "drop" instead of drop_last, or "rollover": samples left over at the end of an epoch begin
        the next epoch's first batch, so every batch is full (see Order); needs a seed and the loader's own order.
    num_workers: with a seed also "auto": the number with which the consumer gets its batches fastest, measured while
        the loader is used. At most the cores that this process may use (loaders.machine), or up to 32 if the workers
        mostly wait, for a disk for example. `loader.num_workers` and get_worker_info() have the largest number.
    prefetch_factor: with a seed also "auto": 4, or less if that would take over an eighth of the available memory.
    prefetch_batches: the total number of batches loaded ahead, instead of prefetch_factor, the number per worker.
    worker_method: "multiprocessing", or "thread" for datasets that release the GIL while they compute or wait.
    on_error: "raise", or "skip" to leave out samples that cannot be read: a batch is then shorter, the log says why.
    max_restarts: how often in a row a batch is retried, after the worker that read it died or hung.

    With a seed it also has `set_epoch`, `state_dict` and `load_state_dict`: see SeededMethods. And a dataset may offer
    `sample_spec()` and `read_batch(indices, out, random)`, which writes into the batch itself: `out` has a tensor
    (len(indices), *shape) for each field of the spec, `random` is a loaders.Random with a stream per row. Batches lie
    in shared memory, which is reused once no tensor uses it any more; a batch that you keep never changes.

    Raises what DataLoader raises, and ValueError for arguments that contradict the above.
    """

    # Set during iter() by a consumer that holds each batch of that iterator until its copies to the GPU are done, as
    # Preloader does: with pin_memory=True they lie in page-locked slots. Other iterators give batches in torch's own
    # pinned memory, which torch does not reuse while a copy from it is under way.
    holds_batches_until_copied = False
    timeline: Timeline | None = None  # records what the workers do; set it before an epoch

    _iterators: weakref.WeakSet[Any]  # all that exist
    _newest: Callable[[], Any]  # a weak reference to the newest iterator
    _current: Any  # the iterator behind next(loader)
    _stats: Stats | None  # of the newest engine
    _runner: EpochRunner  # with a seed

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | str = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | str | None = None,
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
        keep_out_of_compilation()
        self.seed = None if seed is None else checked_seed(seed)
        self.rank, self.world_size, self.pad, self.last_batch = rank, world_size, pad, last_batch
        self.prefetch_batches, self.worker_method = prefetch_batches, worker_method
        self.on_error, self.max_restarts = on_error, max_restarts
        self._closed = False
        self._forget_iterators()
        check_arguments(self, dataset, num_workers, timeout, multiprocessing_context, generator, prefetch_factor)
        # Underscored, because Ignite makes another loader by passing all other attributes to the class.
        self._bounds_memory, self._tuner = prefetch_factor == "auto", cast("Tuner | None", None)
        if isinstance(num_workers, str):
            self._tuner = Tuner(available_cores())
            num_workers = self._tuner.most
            vars(self)["check_worker_number_rationality"] = _nothing  # torch would warn of more workers than cores
        if isinstance(prefetch_factor, str):
            prefetch_factor = AUTO_PREFETCH_FACTOR
        drop_last, rollover = checked_last_batch(last_batch, drop_last)
        own_order, one_at_a_time = None, persistent_workers
        if self.seed is not None and num_workers == 0:  # arguments that only concern workers are ignored
            prefetch_factor, persistent_workers, multiprocessing_context, timeout = None, False, None, 0
        if self.seed is not None and sampler is None and batch_sampler is None:
            split = drop_last, rank, world_size, pad, rollover
            own_order = Order(len(dataset), batch_size or 1, bool(shuffle), self.seed, *split)
            shuffle, sampler = None, OrderSampler(own_order)
        elif rollover:
            raise ValueError(
                "last_batch='rollover' needs a seed and the loader's own order: give seed=0, or another integer, and "
                "leave out sampler and batch_sampler"
            )
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        # Lightning makes loaders anew from the arguments that DataLoader.__init__ got. Those of a subclass it only has
        # if it knew the subclass before.
        if (recorded := vars(self).get("__pl_saved_kwargs")) is not None:
            own = ("seed", "rank", "world_size", "pad", "last_batch", "prefetch_batches", "worker_method", "on_error")
            recorded |= {name: getattr(self, name) for name in (*own, "max_restarts")}
        SeededMethods.give(self, self.seed is not None)
        if own_order is not None and batch_size is not None:  # DataLoader.__setattr__ refuses a new batch_sampler
            vars(self)["batch_sampler"] = own_batch_sampler(cast("OrderSampler", self.sampler), batch_size, drop_last)
        if self.seed is not None:
            # Not as an attribute: Lightning would set this loader's on the one that it makes anew.
            vars(self)["_runner"] = EpochRunner(self, own_order, one_at_a_time)

    def __len__(self) -> int:
        """Batches of the epoch that the next `iter()` runs, on this rank."""
        if self.seed is None:
            return super().__len__()
        if (batches := self._runner.batches_now(self, self._runner.upcoming()[0])) is None:
            raise TypeError("the sampler has no length, so the loader has none either")
        return batches

    def __iter__(self) -> Any:
        keep_out_of_compilation()
        if self._closed:
            raise RuntimeError("this WorkerLoader is closed: make a new one")
        self._current = None
        iterator: Any
        if self.seed is None:
            iterator = super().__iter__()
        else:
            self._end_epoch()
            self._adopt_new_length()
            iterator = self._runner.start(self)
        self._iterators.add(iterator)
        self._newest = weakref.ref(iterator)
        return iterator

    @property
    def has_pool(self) -> bool:
        """Whether workers read the samples, and not the thread that calls next()."""
        return self.num_workers > 0 and (HAS_PROCESSES or self.uses_threads)

    @property
    def uses_threads(self) -> bool:
        """Whether the workers are threads: also with a seed where worker processes are not possible."""
        return self.worker_method == "thread" or (self.seed is not None and not HAS_PROCESSES)

    @property
    def pins_batches(self) -> bool:
        """Whether `next()` copies batches into torch's pinned memory."""
        return self.pin_memory and not self.holds_batches_until_copied and can_pin_memory()

    @property
    def tuner(self) -> Tuner | None:
        """Chooses how many workers get tasks; None: all of them."""
        return self._tuner

    @property
    def bounds_memory(self) -> bool:
        """Whether the batches loaded ahead may take at most an eighth of the available memory."""
        return self._bounds_memory

    def build_engine(self, base_seed: int | None = None) -> Dispatcher:
        """Builds an engine for the loader's epochs; worker i starts with the seed `base_seed` + i."""
        engine = build_engine(self, base_seed)
        self._stats = engine.stats
        return engine

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(self, name)

    def stats(self) -> dict[str, Any]:
        """Returns {"workers": totals}, see loaders.workers.stats; empty before the first epoch and after close().

        The totals are those of the newest workers: without persistent_workers, of the newest epoch.
        """
        return {} if self._stats is None else {"workers": self._stats.as_dict()}

    def close(self) -> None:
        """Ends the workers and all iterators; delivered batches stay valid. May be called repeatedly, in any state."""
        self._closed = True
        for iterator in list(self._iterators):
            getattr(iterator, "end", _nothing)()
        if self.seed is not None:
            self._runner.close()
        self._iterator = None
        self._forget_iterators()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and pickled: all but the workers and iterators."""
        return {**vars(self), **dict.fromkeys(("_iterators", "_newest", "_current", "_stats", "_iterator"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_iterators()
        if self.seed is not None:  # after copy.copy() they are the other loader's, and each loader needs its own
            self._runner, self._tuner = copy(self._runner), deepcopy(self._tuner)

    def _get_iterator(self) -> Any:
        """Returns an iterator of a loader without a seed; torch's `__iter__` calls this."""
        if isinstance(self.dataset, IterableDataset) or (self.num_workers > 0 and not self.has_pool):
            if self.num_workers > 0:
                warn_once("torch's own workers read iterable datasets, and on systems other than Linux all datasets")
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return UnseededIterator(self)

    def _adopt_new_length(self) -> None:
        """Uses the length that the dataset or the sampler has now."""
        if (length := self._runner.samples_now(self)) != self._runner.order.length:
            self._end_epoch()
            self._runner.change_length(self, length)

    def _end_epoch(self) -> None:
        """Ends the newest iterator, unless iterators are independent."""
        if (newest := self._newest()) is not None and self._runner.one_at_a_time:
            newest.end()
        self._current, self._newest = None, _nothing

    def _forget_iterators(self) -> None:
        self._iterators, self._newest, self._current, self._stats = weakref.WeakSet(), _nothing, None, None


def _nothing() -> None:
    """Returns None, as a weak reference does when its object is gone."""
