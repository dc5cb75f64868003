"""The base of the loaders that do not use the engine in workers/: torch's, the resident and the cached one."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler

from .arguments import checked_last_batch, checked_seed
from .base import Closeable, Delivery, EpochIterator, Epochs, Position, Source
from .order import Order
from .samplers import OrderSampler, own_batch_sampler
from .workers.tasks import SamplerError, Task, choose_tasks


class EpochLoader(Closeable):
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
        self.sampler, self.batch_sampler = sampler, batch_sampler or BatchSampler(sampler, batch_size, drop_last)
        self._epochs = Epochs(choose_tasks(self, own), batch_sampler, sampler)
        self._iterator: EpochIterator | None = None
        self._closed = False

    def _prepare(self) -> None:
        """Makes what all epochs need. It is called before each epoch begins; if it raises, the epoch has not begun."""

    def _open(self, epoch: int, first: int) -> Source:
        """Returns the batches of epoch `epoch` from number `first` on."""
        raise NotImplementedError

    @property
    def _order(self) -> Order:
        return self._epochs.order

    def __len__(self) -> int:
        """Batches of the epoch that the next `iter()` runs, on this rank."""
        if self._order.length == sys.maxsize:
            raise TypeError("the sampler has no length, so the loader has none either")
        return self._order.batches_in(self._epochs.upcoming()[0])

    def __iter__(self) -> EpochIterator:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: make a new one")
        if not self._epochs.tasks.has_sampler and len(self.dataset) != self._order.length:
            raise RuntimeError(
                f"{type(self.dataset).__name__} had {self._order.length:,} samples when this {type(self).__name__} "
                f"was made, and has {len(self.dataset):,} now: make a new loader"
            )
        self._end_epoch()
        self._prepare()
        position = Position(*self._epochs.upcoming())
        length = None if self._order.length == sys.maxsize else len(self)
        self._iterator = EpochIterator(self._open(position.epoch, position.batch), position, length)
        self._epochs.begin(position)
        return self._iterator

    def __next__(self) -> Any:
        """Returns the next batch of the running epoch, or of a new one if none is running."""
        if self._iterator is None or self._iterator.position.finished:
            iter(self)
        assert self._iterator is not None
        return next(self._iterator)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next `iter()` runs."""
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, counted in samples delivered to all ranks: plain JSON."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what the next `iter()` runs. Raises ValueError for a state of another seed, length or global batch."""
        self._epochs.load_state_dict(state)
        self._end_epoch()

    def stats(self) -> dict[str, Any]:
        """Returns an empty dict: this loader keeps no figures."""
        return {}

    def close(self) -> None:
        """Ends the epoch; delivered batches stay valid. May be called repeatedly, in any state."""
        self._closed = True
        self._end_epoch()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and pickled: a copy has no iterator yet, and counts its own epochs."""
        return {**vars(self), "_epochs": copy(self._epochs), "_iterator": None}

    def _end_epoch(self) -> None:
        if self._iterator is not None:
            self._iterator.end()
            self._iterator = None


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
