"""torch's DataLoader with another engine: workers write batches into shared memory, and they come out in order.

Without a seed it behaves exactly as torch's: order, random numbers, round robin, iterators, error messages. With a
seed, order and random numbers are pure functions of (seed, epoch, position, index). So batches have the same bytes
whatever the number of workers, a resume is exact, and the next epoch's first batches are loaded ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from functools import partial
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from .arguments import check_arguments, check_stream_arguments, checked_last_batch, checked_seed
from .base import nothing
from .epoch_loader import EpochMethods
from .machine import available_cores
from .optional_methods import Closeable, keep_out_of_compilation, raise_missing
from .order import Order
from .samplers import OrderSampler, own_batch_sampler
from .workers.added import Added
from .workers.autotune import Tuner
from .workers.engine import has_pool, replaced_part, warn_once
from .workers.epochs import EngineEpochs, EpochSource, SeededMethods, TorchInlineIterator, TorchWorkersIterator
from .workers.stream_epochs import StreamEpochs, StreamSource
from .workers.tasks import choose_tasks

log = logging.getLogger(__name__)

AUTO_PREFETCH_FACTOR = 4  # batches per worker: while one batch takes long, the other workers can go on

T_co = TypeVar("T_co", covariant=True)


class WorkerLoader(DataLoader[T_co], Closeable):
    """Batches of a dataset, on the host; takes torch's arguments, and:

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

    streams, shuffle_buffer, steps_per_epoch: for an iterable dataset with a seed. It is read as that many streams,
        shared evenly by the ranks. Each has its own copy of the dataset, and sees get_worker_info() with its number
        as `id` and `num_workers=streams`. So batches, and where a run resumes, do not depend on the number of workers.
        Batches come from the streams in turn. A stream shuffles each `shuffle_buffer` successive samples. An epoch
        ends when all streams have ended, and the loader has no length; or after `steps_per_epoch` batches. Then the
        next epoch goes on from there, and a stream that ends begins anew.

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
    _added: Added  # all else that the loader has and a DataLoader has not

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
        streams: int = 8,
        shuffle_buffer: int = 0,
        steps_per_epoch: int | None = None,
    ) -> None:
        keep_out_of_compilation()
        seed = None if seed is None else checked_seed(seed)
        how_split = rank, world_size, pad, last_batch
        of_streams = streams, shuffle_buffer, steps_per_epoch
        added = Added(seed, *how_split, prefetch_batches, worker_method, on_error, max_restarts, *of_streams)
        vars(self)["_added"] = added
        check_arguments(added, num_workers, timeout, multiprocessing_context, generator, prefetch_factor)
        if isinstance(dataset, IterableDataset):
            check_stream_arguments(added, dataset, shuffle)
        added.bounds_memory = prefetch_factor == "auto"
        is_stream = isinstance(dataset, IterableDataset)
        if isinstance(num_workers, str) and is_stream:
            num_workers = min(available_cores(), streams // world_size)  # each stream stays with one worker
        if isinstance(num_workers, str):
            added.tuner = Tuner(available_cores())
            num_workers = added.tuner.most
            vars(self)["check_worker_number_rationality"] = nothing  # torch would warn of more workers than cores
        if isinstance(prefetch_factor, str):
            prefetch_factor = AUTO_PREFETCH_FACTOR
        drop_last, rollover = checked_last_batch(last_batch, drop_last)
        own_order, one_at_a_time = None, persistent_workers
        if seed is not None and num_workers == 0:  # arguments that only concern workers are ignored
            prefetch_factor, persistent_workers, multiprocessing_context, timeout = None, False, None, 0
        if seed is not None and sampler is None and batch_sampler is None and not is_stream:
            split = drop_last, rank, world_size, pad, rollover
            own_order = Order(len(dataset), batch_size or 1, bool(shuffle), seed, *split)
            shuffle, sampler = None, OrderSampler(own_order)
        elif rollover:
            raise ValueError(
                "last_batch='rollover' needs a seed and the loader's own order: give seed=0, or another integer, and "
                "leave out sampler and batch_sampler"
            )
        # Programs replace DataLoader.__init__ by one that adds arguments which were not given.
        now = locals()
        super().__init__(dataset, **{name: now[name] for name in TORCHS if now[name] is not DEFAULTS[name]})
        # Lightning makes loaders anew from the arguments that DataLoader.__init__ got. Those of a subclass it only has
        # if it knew the subclass before. Ignite passes all attributes without an underscore to the class.
        if (recorded := vars(self).get("__pl_saved_kwargs")) is not None:
            recorded |= added.given()
        SeededMethods.give(self, seed is not None)
        if seed is None:
            return
        vars(self).update(added.given())
        if own_order is not None and batch_size is not None:  # DataLoader.__setattr__ refuses a new batch_sampler
            vars(self)["batch_sampler"] = own_batch_sampler(cast("OrderSampler", self.sampler), batch_size, drop_last)
        if is_stream:
            added.epochs = StreamEpochs(self, one_at_a_time)
        else:
            tasks = choose_tasks(self, own_order, seed, rank, world_size, pad)
            added.epochs = EngineEpochs(self, tasks, one_at_a_time)

    def __len__(self) -> int:
        """Batches of the epoch that the next `iter()` runs, on this rank."""
        return super().__len__() if self._added.epochs is None else EpochMethods.__len__(self)  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        keep_out_of_compilation()
        added = self._added
        if added.closed:
            raise RuntimeError("this WorkerLoader is closed: make a new one")
        if added.epochs is None:
            return super().__iter__()
        if part := replaced_part():
            warn_once(f"the program has replaced torch's {part}, which is not used here: leave out the seed")
        seeded: Any = self  # mypy does not see its methods
        source = StreamSource if isinstance(added.epochs, StreamEpochs) else EpochSource
        iterator = seeded._start_epoch(partial(source, self))
        added.iterators.add(iterator)
        return iterator

    def __setattr__(self, name: str, value: Any) -> None:
        added = vars(self).get("_added")
        if added is not None and added.epochs is not None and name in added.given() and getattr(added, name) != value:
            raise ValueError(f"{name} attribute should not be set after {type(self).__name__} is initialized")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise_missing(self, name)

    def stats(self) -> dict[str, Any]:
        """Returns {"workers": totals}, see loaders.workers.stats; empty before the first epoch and after close().

        The totals are those of the newest workers: without persistent_workers, of the newest epoch.
        """
        return {} if self._added.stats is None else {"workers": self._added.stats.as_dict()}

    def close(self) -> None:
        """Ends the workers and all iterators; delivered batches stay valid. May be called repeatedly, in any state."""
        added = self._added
        added.closed = True
        for iterator in list(added.iterators):
            getattr(iterator, "end", nothing)()
        if added.epochs is not None:
            added.epochs.close()
        self._iterator = added.stats = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and pickled: all but the workers and iterators."""
        return {**vars(self), "_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "_added" in state:  # a subclass may call __init__ later
            vars(self)["_added"] = copy(self._added)  # after copy.copy() it is the other loader's

    def _get_iterator(self) -> Any:
        """Returns an iterator of a loader without a seed; torch's `__iter__` calls this; a subclass may wrap it."""
        if isinstance(self.dataset, IterDataPipe):
            return super()._get_iterator()
        if part := replaced_part():
            warn_once(f"the program has replaced torch's {part}, so torch's own loader reads, which takes longer")
            return super()._get_iterator()
        if self.num_workers > 0 and not has_pool(self):
            warn_once("torch's own workers read on systems other than Linux; with a seed, threads read")
            return super()._get_iterator()
        self.check_worker_number_rationality()
        iterator = (TorchWorkersIterator if self.num_workers > 0 else TorchInlineIterator)(self)
        self._added.iterators.add(iterator)
        return iterator

    def _dataset_has_changed(self, before: int, now: int) -> None:
        log.warning(
            "%s had %d samples and has %d now: this epoch uses the new length, and the workers are restarted",
            type(self.dataset).__name__,
            before,
            now,
        )
        assert self._added.epochs is not None
        self._added.epochs.close()


DEFAULTS = {name: parameter.default for name, parameter in signature(WorkerLoader).parameters.items()}
TORCHS = [*DEFAULTS][1 : [*DEFAULTS].index("seed")]  # the arguments of DataLoader, but for the dataset
