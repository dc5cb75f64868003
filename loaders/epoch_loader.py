"""The methods of every loader that counts its epochs, and the base of those without the engine in workers/."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler

from .arguments import checked_last_batch, checked_seed
from .base import Delivery, EpochIterator, Epochs, Source
from .optional_methods import Closeable
from .order import Order
from .samplers import OrderSampler, length_of, own_batch_sampler
from .workers.tasks import SamplerError, Task, choose_tasks


class EpochMethods:
    """What a loader that counts its epochs has: state and position are in `_epochs`, which is never shared."""

    dataset: Any
    sampler: Any
    in_order = True
    _epochs: Epochs

    def __len__(self) -> int:
        """Batches of the epoch that the next `iter()` runs, on this rank."""
        if (length := self._length_now()) == sys.maxsize:
            raise TypeError(f"the {self._epochs.tasks.kind} has no length, so the loader has none either")
        return replace(self._epochs.order, length=length).batches_in(self._epochs.upcoming()[0])

    def __next__(self) -> Any:
        """Returns the next batch of the newest iterator, or of a new one if that is at its end."""
        epochs = self._epochs
        current = epochs.newest() if epochs.current is None else epochs.current
        if current is None or not getattr(current, "is_running", True):
            current = iter(self)  # type: ignore[call-overload]  # a loader has it
        try:
            return next(current)
        except StopIteration:
            epochs.end()
            current = None
            raise
        finally:
            epochs.current = current  # a subclass may have wrapped the newest: keep the wrapper

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next `iter()` runs; also calls `set_epoch` of your sampler, if it has one."""
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the newest epoch, counted in samples delivered to all ranks: plain JSON.

        Raises ValueError if an epoch cannot be resumed: with in_order=False, or a sampler that holds a generator.
        """
        if not self.in_order:
            raise ValueError("in_order=False has no state: what was delivered is not a prefix of the epoch")
        return self._epochs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what the next `iter()` runs. Raises ValueError for a state of another seed, length, batch or order."""
        self._epochs.end_reader()
        self._adopt_new_length()
        self._epochs.load_state_dict(state)
        self._epochs.end()

    def _start_epoch(self, open_source: Callable[[int, int], Source]) -> EpochIterator:
        """Starts the upcoming epoch, and ends the previous one before."""
        self._epochs.end_reader()
        self._adopt_new_length()
        self._epochs.end()
        length = None if self._epochs.order.length == sys.maxsize else len(self)
        return self._epochs.start(open_source, length)

    def _length_now(self) -> int:
        """Returns the length that the dataset or the user's sampler has now."""
        tasks = self._epochs.tasks
        return length_of(tasks.sampler) if tasks.has_sampler else len(self.dataset)

    def _adopt_new_length(self) -> None:
        """Uses the length that the dataset or the sampler has now, as torch does."""
        length, before = self._length_now(), self._epochs.order.length
        if length == before:
            return
        self._epochs.end()
        if not self._epochs.tasks.has_sampler:
            self._dataset_has_changed(before, length)
        self._epochs.tasks.order = replace(self._epochs.order, length=length)
        if isinstance(self.sampler, OrderSampler):
            self.sampler.order = self._epochs.order

    def _dataset_has_changed(self, before: int, now: int) -> None:
        """Is called if the dataset's length has changed."""
        raise NotImplementedError


class EpochLoader(EpochMethods, Closeable):
    """Delivers batches of a map-style dataset in our order, or a sampler's.

    A subclass makes an epoch's batches in `_open`. `iter()` ends the previous iterator. The arguments, which decide
    the order, mean what they mean in WorkerLoader.
    Raises TypeError for a dataset without a length, ValueError for a batch size below 1 or arguments that contradict
    each other.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        pad: bool = True,
        last_batch: str | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(self).__name__} needs a map-style dataset, and {type(dataset).__name__} has no __len__: "
                "use torch's own DataLoader for an iterable dataset"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give a number from 1")
        drop_last, rollover = checked_last_batch(last_batch, drop_last)
        if sampler is not None and batch_sampler is not None:
            raise ValueError("sampler and batch_sampler were both given: give one of them")
        own = None
        if sampler is None and batch_sampler is None:
            own = Order(len(dataset), batch_size, shuffle, seed, drop_last, rank, world_size, pad, rollover)
            sampler = OrderSampler(own)
            batch_sampler = own_batch_sampler(sampler, batch_size, drop_last)
        elif shuffle or rollover:
            raise ValueError("shuffle and last_batch='rollover' are for the loader's own order: leave out the sampler")
        self.dataset, self.seed = dataset, checked_seed(seed)
        self.batch_size = None if sampler is None else batch_size  # as torch's DataLoader has it
        self.drop_last, self.rank, self.world_size, self.pad = drop_last, rank, world_size, pad
        if batch_sampler is None:
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self._epochs = Epochs(choose_tasks(self, own, self.seed, rank, world_size, pad), batch_sampler, sampler)
        self._closed = False

    def _prepare(self) -> None:
        """Makes what all epochs need. It is called before each epoch begins; if it raises, the epoch has not begun."""

    def _open(self, epoch: int, first: int) -> Source:
        """Returns the batches of epoch `epoch` from number `first` on."""
        raise NotImplementedError

    def __iter__(self) -> EpochIterator:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: make a new one")
        return self._start_epoch(self._prepare_and_open)

    def _prepare_and_open(self, epoch: int, first: int) -> Source:
        self._prepare()
        return self._open(epoch, first)

    def stats(self) -> dict[str, Any]:
        """Returns an empty dict: this loader keeps no figures."""
        return {}

    def close(self) -> None:
        """Ends the epoch; delivered batches stay valid. May be called repeatedly, in any state."""
        self._closed = True
        self._epochs.end()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and pickled: a copy has no iterator yet, and counts its own epochs."""
        return {**vars(self), "_epochs": copy(self._epochs)}

    def _dataset_has_changed(self, before: int, now: int) -> None:
        kind = type(self).__name__
        raise RuntimeError(
            f"{type(self.dataset).__name__} had {before:,} samples when this {kind} was made, and has {now:,} now: "
            "make a new loader"
        )


class TaskSource:
    """A source that makes a batch of each task: make(task)."""

    def __init__(self, make: Callable[[Task], Any], tasks: Iterator[Task]) -> None:
        self._make, self._tasks = make, tasks
        self._drawn: deque[Task] = deque()  # the task of the newest delivery
        self._delivery: Delivery | None = None

    def next(self) -> Delivery | None:
        if self._delivery is not None and self._delivery.is_taken:
            self._drawn.clear()
            self._delivery = None
        if self._delivery is None:
            self._delivery = self._made()
        return self._delivery

    def _made(self) -> Delivery | None:
        try:
            self._drawn.extend(islice(self._tasks, 1 - len(self._drawn)))  # one call, which loses no task
        except SamplerError as error:
            self._tasks = iter(())
            return Delivery(None, error=error.__cause__)
        if not self._drawn:
            return None
        task = self._drawn[0]
        try:
            return Delivery(task.number, self._make(task))
        except Exception as error:
            return Delivery(task.number, error=error)

    def close(self) -> None:
        self._delivery, self._tasks = None, iter(())
        self._drawn.clear()
