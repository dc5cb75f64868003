"""Makes the tasks of each epoch of a seeded WorkerLoader, in our own order or in that of a user's sampler.

A user's sampler is never changed. It is iterated once per epoch, when that epoch begins.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from ..order import EpochBatches, Order
from ..randomness import fold, global_states, preserved_globals, restore_globals, seed_globals
from ..samplers import length_of

log = logging.getLogger(__name__)


class Task(NamedTuple):
    """A batch to read. Without a seed it has indices only, and samples draw from the worker's own generators."""

    indices: Any  # a sequence of dataset indices; a single one without automatic batching
    epoch: int | None = None
    number: int | None = None  # the batch's number in the epoch
    positions: bytes | None = None  # the rows' positions in the epoch, int64; an array would take 15 us to send
    singly: bool = False  # read sample by sample, because reading the whole batch crashed a worker
    without: frozenset[int] = frozenset()  # rows to leave out, because reading them crashed workers
    row_epochs: np.ndarray | None = None  # the rows' epochs, int64, if `positions` are in more than one

    def random_key(self, rows: slice = slice(None)) -> tuple[Any, Any]:
        """Returns the rows' epochs and their positions there, which are part of the key of their random numbers."""
        assert self.epoch is not None and self.positions is not None
        positions = np.frombuffer(self.positions, np.int64)
        return self.epoch if self.row_epochs is None else self.row_epochs[rows], positions[rows]


class SamplerError(RuntimeError):
    """Wraps, as its cause, an error that a user's sampler raised, to tell it from a signal handler's exception."""


class UnseededTasks:
    """The tasks of an epoch of a loader without a seed, in the order of its sampler's iterator."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._drawn: list[Any] = []  # the item of the next task, once it is drawn
        self._number = 0  # of that task

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        try:
            self._drawn.extend(map(next, [self._items][len(self._drawn) :]))  # one call, which loses no item
        except Exception as error:
            raise SamplerError from error
        if not self._drawn:
            raise StopIteration
        task = Task(snapshot(self._drawn[0]), number=self._number)
        self._number, self._drawn = self._number + 1, []  # no call from here on
        return task


class OwnTasks:
    """Tasks in our own order."""

    overruns = False  # an epoch has as many samples as its order says
    has_sampler = False  # of the user's

    def __init__(self, order: Order, form: Callable[[np.ndarray], Any] | None = None) -> None:
        self.order = order
        self.kind = order.kind
        self.form = form or _all  # makes a task's indices of an array, int64 (rows,)

    def epoch(self, epoch: int, first: int) -> Iterator[Task]:
        """Returns the epoch's tasks from batch number `first` on."""
        return _OwnEpochs(self, epoch, first, endless=False)

    def onwards(self, epoch: int, first: int) -> Iterator[Task]:
        """Returns the epoch's tasks, and then those of all later epochs."""
        return _OwnEpochs(self, epoch, first, endless=self.order.has_batches)


class _OwnEpochs:
    """Iterates over tasks. Not a generator: an exception from a signal handler would end it."""

    def __init__(self, tasks: OwnTasks, epoch: int, first: int, endless: bool) -> None:
        self._order, self._form, self._endless = tasks.order, tasks.form, endless
        self._epoch, self._number = epoch, first
        self._batches = EpochBatches(tasks.order, epoch)

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        while self._number >= len(self._batches):
            if not self._endless:
                raise StopIteration
            batches = EpochBatches(self._order, self._epoch + 1)
            self._epoch, self._number, self._batches = self._epoch + 1, 0, batches
        epoch, number = self._epoch, self._number
        relative, indices = self._batches[number]
        epochs, positions = self._order.origins(epoch, relative)
        row_epochs = epochs if isinstance(epochs, np.ndarray) else None
        task = Task(self._form(indices), epoch, number, positions.tobytes(), row_epochs=row_epochs)
        self._number = number + 1  # no call from here on: whoever calls this by C code loses no task
        return task


class SamplerTasks:
    """Tasks in the order of a user's sampler. One of indices is split among ranks as our own order is.

    kind: "sampler" of indices, or "batch_sampler", which gives the tasks' indices: batches if they are `batched`.
    """

    has_sampler = True

    def __init__(self, sampler: Any, order: Order, kind: str = "sampler", batched: bool = True) -> None:
        self.sampler, self.order, self.kind, self.batched = sampler, order, kind, batched
        self.overruns = False  # in the newest epoch the sampler may give more items than its length says

    def epoch(self, epoch: int, first: int) -> Iterator[Task]:
        """Returns the epoch's tasks from batch number `first` on."""
        items, self.overruns = draw(self.sampler, self.order.seed, epoch)
        return filter(None, _SamplerEpoch(self, items, epoch, first))


class _SamplerEpoch:
    """Iterates over the tasks of an epoch, None for those before batch `first` or without rows. Not a generator."""

    def __init__(self, tasks: SamplerTasks, items: Iterator[Any], epoch: int, first: int) -> None:
        self._order, self._batched, self._items = tasks.order, tasks.batched, items
        self._gives_indices = tasks.kind == "sampler"
        self._count = tasks.order.global_batch_size if self._gives_indices else 1  # items of a global batch
        self._epoch, self._first = epoch, first
        self._number = self._start = 0  # the next batch, and its first row's position
        self._drawn: list[Any] = []
        self._head: list[Any] = []  # the first global batch, which pads the last one

    def __iter__(self) -> Iterator[Task | None]:
        return self

    def __next__(self) -> Task | None:
        number, start, drawn = self._number, self._start, self._drawn
        drawn.extend(islice(self._items, self._count - len(drawn)))  # one call, so that no exception loses an item
        if not drawn or (self._order.drop_last and len(drawn) < self._count):
            raise StopIteration
        head = self._head = self._head or drawn
        if self._gives_indices:
            stop = start + len(drawn)
            positions = replace(self._order, length=stop).positions(number)  # the sampler's own length may be wrong
            indices = [drawn[at - start] if at >= start else head[at] for at in positions.tolist()]
            is_read = number >= self._first and len(positions) > 0
        else:
            indices, is_read = drawn[0], number >= self._first
            stop = start + (len(indices) if self._batched else 1)
            positions = np.arange(start, stop, dtype=np.int64)
        task = Task(indices, self._epoch, number, positions.tobytes()) if is_read else None
        self._number, self._start, self._drawn = number + 1, stop, []  # no call from here on
        return task


def choose_tasks(
    loader: Any, own_order: Order | None, seed: int, rank: int, world_size: int, pad: bool
) -> OwnTasks | SamplerTasks:
    """Returns the tasks of a loader with a seed: in `own_order`, or if that is None in the order of its sampler."""
    batched = loader.batch_sampler is not None
    if own_order is not None:
        return OwnTasks(own_order, _all if batched else _only)
    gives_batches = loader.batch_size is None
    if gives_batches and world_size > 1:
        raise ValueError("world_size > 1 splits batches of batch_size: it cannot be used with a batch_sampler")
    sampler = loader.batch_sampler if gives_batches and batched else loader.sampler
    parts = loader.drop_last, rank, world_size, pad
    order = Order(length_of(sampler), loader.batch_size or 1, False, seed, *parts)
    return SamplerTasks(sampler, order, "batch_sampler" if gives_batches else "sampler", batched)


def _all(indices: np.ndarray) -> list[int]:
    rows: list[int] = indices.tolist()
    return rows


def _only(indices: np.ndarray) -> int:
    return int(indices[0])


def draw(sampler: Any, seed: int, epoch: int) -> tuple[Iterator[Any], bool]:
    """Returns the items of a user's sampler, and whether it may give more of them than its length says.

    As many items as its length says are drawn now, with the global generators seeded from (seed, epoch). Items after
    that, and all items of a sampler without a length, are drawn when they are needed, because many samplers never end.
    If the sampler raises an error, the iterator raises a SamplerError after the items before it.
    """
    length = length_of(sampler)
    most = 0 if length == sys.maxsize else length + 1  # one more, to see whether the sampler ends there
    items: list[Any] = []
    error = None
    with preserved_globals():
        seed_globals(int(fold(seed, epoch)))
        try:
            given = iter(sampler)
            for item in islice(given, most):
                items.append(snapshot(item))
        except Exception as raised:
            error = raised
        states = global_states()
    if error is not None or len(items) < most:
        return chain(items, map(_raise, [error] if error else [])), False
    return chain(items, _OnDemand(given, states, threading.get_ident())), True


def snapshot(indices: Any) -> Any:
    """Returns a copy of the indices, because some samplers fill the same list or array again for each batch.

    An index that is a view of a tensor would be pickled with the whole tensor.
    """
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    if isinstance(indices, list) and any(isinstance(index, torch.Tensor) for index in indices):
        copied = copy(indices)  # of the same type
        copied[:] = map(snapshot, indices)
        return copied
    return copy(indices) if isinstance(indices, (list, dict, np.ndarray)) else indices


def _raise(error: Exception) -> Any:
    raise SamplerError from error


class _OnDemand:
    """Iterates over a sampler's items; in the given thread, each is drawn with the generators going on from `states`.

    Another thread, such as a preloader's, must not touch the global generators: the training loop draws from them.
    """

    def __init__(self, items: Iterator[Any], states: Any, thread: int) -> None:
        self._items, self._states, self._thread = items, states, thread
        self._drawn: list[Any] = []  # the item that comes next, once it is drawn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._drawn:  # an exception came after it was drawn
            pass
        elif threading.get_ident() != self._thread:
            _warn_of_unseeded_drawing()
            self._draw()
        else:
            with preserved_globals():
                restore_globals(self._states)
                try:
                    self._draw()
                finally:
                    self._states = global_states()
        if not self._drawn:
            raise StopIteration
        item = snapshot(self._drawn[0])
        self._drawn = []  # no call from here on
        return item

    def _draw(self) -> None:
        try:
            self._drawn.extend(map(next, (self._items,)))  # one call, which loses no item
        except Exception as error:
            raise SamplerError from error


@cache
def _warn_of_unseeded_drawing() -> None:
    log.warning(
        "a sampler without a length, or past its length, is iterated in a thread, where the loader does not seed the "
        "global generators: if it draws from them, the order differs from run to run"
    )
