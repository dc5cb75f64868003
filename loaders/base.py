"""What all loaders share: the count of epochs, the position in an epoch, its iterator, and the state to resume from.

A signal handler may raise an exception in the main thread wherever a function begins or a call returns; an exception
that comes there must not lose a batch. So each source keeps its newest delivery until the epoch's iterator has taken
it, and the iterator makes no call between that and the return to the consumer. The position in an epoch has one owner,
a Position, and advances at the same moment.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from .arguments import as_index
from .order import Order
from .samplers import check_resumable, pass_on_epoch

VERSION = 2  # of the state
ENDED = "a newer iter() or load_state_dict() ended this epoch, or the loader was closed"


@dataclass
class Delivery:
    """A batch, or the error in its place, and its number in the epoch (None: the error belongs to no batch)."""

    number: int | None
    batch: Any = None
    error: BaseException | None = None
    is_taken: bool = False  # the consumer gets it now
    progress: Any = None  # of its stream: see workers/stream_reader.py

    def __post_init__(self) -> None:
        if isinstance(self.error, StopIteration):  # raised by next(), it would silently end the epoch
            cause, self.error = self.error, RuntimeError("reading or transforming a batch raised StopIteration")
            self.error.__cause__ = cause


class Source(Protocol):
    """Where the batches of one epoch come from."""

    def next(self) -> Delivery | None:
        """Waits for the next batch, and returns the same one again until it is taken; None at the end of the epoch.

        Raises errors that belong to no batch.
        """

    def close(self) -> None:
        """Ends the epoch. May be called repeatedly."""


@dataclass
class Position:
    """Where the consumer is in an epoch: it gets batch number `batch` next."""

    epoch: int
    batch: int = 0
    finished: bool = False
    sampler_epoch: int | None = None  # that the user's sampler had when it was iterated


class EpochIterator:
    """Iterates over one epoch: what `iter(loader)` returns. It keeps `owner` alive."""

    reader: weakref.ref[Source] | None = None  # the preloader's epoch that reads this one, perhaps in a thread

    def __init__(self, source: Source, position: Position, length: int | None = None, owner: Any = None) -> None:
        self.position = position
        self._owner = owner
        self._source: Source | None = source
        self._length = length
        self._fetching = threading.RLock()  # threads may share an iterator; each batch is delivered to one of them

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this epoch's number of batches is unknown: its sampler has no length")
        return self._length

    def __next__(self) -> Any:
        position, source = self.position, self._source
        if position.finished:
            raise StopIteration
        if source is None:
            raise RuntimeError(ENDED)
        while True:
            with self._fetching:
                delivery = None if position.finished else source.next()
                if delivery is None:
                    position.finished = True
                    self._close_source()
                    raise StopIteration
            if not delivery.is_taken:  # by another thread
                break
        # No call from here on: see above.
        number, batch, error = delivery.number, delivery.batch, delivery.error
        if number is not None:
            position.batch = number + 1
        delivery.is_taken = True
        delivery.batch = delivery.error = None
        if error is None:
            return batch
        context = error.__context__  # the consumer may call next() where it handles another error
        try:
            raise error
        finally:  # else the error and this frame, which its traceback refers to, would keep each other alive
            error.__context__ = context
            del error, context, delivery

    def end_reader(self) -> None:
        """Ends the preloader's epoch that reads this one, and waits for its thread: an engine serves one at a time."""
        if self.reader is not None and (reader := self.reader()) is not None:
            reader.close()

    def end(self) -> None:
        """Ends the epoch. A later next() raises RuntimeError, or StopIteration if all batches were delivered."""
        self._close_source()

    def _close_source(self) -> None:
        if (source := self._source) is not None:
            source.close()
            self._source = None

    def __getstate__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} cannot be copied or pickled: call iter(loader) again")

    @property
    def is_running(self) -> bool:
        return self._source is not None

    @property
    def _workers(self) -> list[Any]:
        """The worker processes, under the name that torch gives them."""
        return getattr(self._source, "processes", [])

    def _shutdown_workers(self) -> None:
        """Ends the epoch, under the name that torch gives it."""
        self.end()


class Epochs:
    """Counts a loader's epochs, and makes and reads its state.

    tasks: what makes the tasks of an epoch, and so the order: see loaders.workers.tasks.
    samplers: the user's, which `set_epoch` is passed on to.
    """

    one_at_a_time = True  # a new iterator ends the one before

    def __init__(self, tasks: Any, *samplers: Any) -> None:
        self.tasks = tasks
        self._samplers = samplers
        self._sampler_epoch: int | None = None  # that set_epoch gave them, as they may have another order then
        self.position: Position | None = None  # of the newest epoch
        self._next: tuple[int, int] | None = None  # epoch and batch that set_epoch or load_state_dict named
        self.newest: Callable[[], Any] = nothing  # a weak reference to the newest iterator
        self.current: Any = None  # the iterator behind next(loader)

    @property
    def order(self) -> Order:
        order: Order = self.tasks.order
        return order

    @property
    def is_running(self) -> bool:
        """Whether the newest epoch has batches left.

        If a sampler gives more samples than its length says, that is so until the sampler ends.
        """
        position = self.position
        if position is None or position.finished:
            return False
        return self.tasks.overruns or position.batch < self.order.batches_in(position.epoch)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and pickled: a copy begins at this position, and advances its own."""
        own = {"position": copy(self.position), "tasks": copy(self.tasks), "newest": nothing, "current": None}
        return {**vars(self), **own}

    def upcoming(self) -> tuple[int, int]:
        """Returns the epoch that `start` starts next, and the number of the batch that it starts with."""
        return self._next or (0 if self.position is None else self.position.epoch + 1, 0)

    def start(self, open_source: Callable[[int, int], Source], length: int | None) -> EpochIterator:
        """Starts the upcoming epoch of `length` batches, whose source is open_source(epoch, first batch)."""
        position = Position(*self.upcoming(), sampler_epoch=self._sampler_epoch)
        source = open_source(position.epoch, position.batch)
        self.position, self._next = position, None
        iterator = EpochIterator(source, position, length)
        self.newest = weakref.ref(iterator)
        return iterator

    def end_reader(self) -> None:
        """Ends the preloader's epoch that reads the newest iterator, unless iterators are independent."""
        if (newest := self.newest()) is not None and self.one_at_a_time:
            newest.end_reader()

    def end(self) -> None:
        """Ends the newest iterator, unless iterators are independent."""
        if (newest := self.newest()) is not None and self.one_at_a_time:
            newest.end()
        self.current, self.newest = None, nothing

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that `start` starts next; a loaded state's epoch starts at its position.

        Also calls `set_epoch` of the user's samplers, if they have it.
        Raises ValueError if it is not an integer from 0.
        """
        number = as_index(epoch)
        if number < 0:
            raise ValueError(f"set_epoch({epoch!r}): an epoch is an integer from 0")
        if self._next is None or self._next[0] != number:
            self._next = (number, 0)
        self._set_sampler_epoch(number)

    def _set_sampler_epoch(self, epoch: int | None) -> None:
        if epoch is not None:
            self._sampler_epoch = epoch
            pass_on_epoch(epoch, *self._samplers)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position to resume from, and what makes the order: plain JSON.

        Raises ValueError if a sampler holds a random generator.
        """
        if self.tasks.has_sampler:
            check_resumable(*self._samplers)
        position = self.position if self.is_running else None
        position = position or Position(*self.upcoming(), sampler_epoch=self._sampler_epoch)
        samples = self.order.samples_before(position.batch)
        state = {"version": VERSION, "epoch": position.epoch, "samples": samples, **self._identity()}
        if position.sampler_epoch is not None and self.tasks.has_sampler:
            state["sampler_epoch"] = position.sampler_epoch
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what `start` starts next. Raises ValueError for a state of another version, order or dataset."""
        for key, ours in {"version": VERSION, **self._identity()}.items():
            if state.get(key) != ours:
                raise ValueError(
                    f"this state has {key}={state.get(key)!r}, but the loader has {key}={ours!r}: "
                    f"resume with the {key} of the state, or start afresh"
                )
        epoch, samples = state.get("epoch"), state.get("samples")
        length = self.order.length
        if not (isinstance(epoch, int) and isinstance(samples, int)) or epoch < 0 or not 0 <= samples <= length:
            raise ValueError(
                f"this state has epoch={epoch!r} and samples={samples!r}: both have to be integers from 0, and "
                f"samples at most {length}; use a state that state_dict() returned"
            )
        self._next, self.position = (epoch, samples // self.order.global_batch_size), None
        self._set_sampler_epoch(state.get("sampler_epoch"))

    def _identity(self) -> dict[str, Any]:
        order = self.order
        return {
            "seed": order.seed,
            "dataset_length": order.length,
            "global_batch_size": order.global_batch_size,
            "order": self.tasks.kind,
        }


def nothing() -> None:
    """Returns None, as a weak reference does when its object is gone."""
