"""Makes the tasks of each epoch of a seeded WorkerLoader, in our own order or in that of a user's sampler.

A user's sampler is never changed. It is iterated once per epoch, when that epoch begins.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from ..order import Order
from ..randomness import fold, global_states, preserved_globals, restore_globals, seed_globals
from ..samplers import length_of

log = logging.getLogger(__name__)

END = object()  # what next() returns at the end of a sampler


@dataclass(frozen=True)
class Task:
    """A batch to read. Without a seed it has indices only, and samples draw from the worker's own generators."""

    indices: Any  # a sequence of dataset indices; a single one without automatic batching
    epoch: int | None = None
    number: int | None = None  # the batch's number in the epoch
    positions: np.ndarray | None = None  # the rows' positions in the epoch, int64
    singly: bool = False  # read sample by sample, because reading the whole batch crashed a worker
    without: frozenset[int] = frozenset()  # rows to leave out, because reading them crashed workers
    row_epochs: np.ndarray | None = None  # the rows' epochs, int64, if `positions` are in more than one

    def random_key(self, rows: slice = slice(None)) -> tuple[Any, Any]:
        """Returns the rows' epochs and their positions there, which are part of the key of their random numbers."""
        assert self.epoch is not None and self.positions is not None
        return self.epoch if self.row_epochs is None else self.row_epochs[rows], self.positions[rows]


def unseeded_task(indices: Any) -> Task:
    """Returns the task of a batch, or sample, of a loader without a seed."""
    return Task(snapshot(indices))


class SamplerError(RuntimeError):
    """Wraps, as its cause, an error that a user's sampler raised, to tell it from a signal handler's exception."""


class OwnTasks:
    """Tasks in our own order."""

    overruns = False  # an epoch has as many samples as its order says

    def __init__(self, order: Order, batched: bool) -> None:
        self.order = order
        self.kind = order.kind
        self._batched = batched

    def epoch(self, epoch: int, first: int) -> Iterator[Task]:
        """Yields the epoch's tasks from batch number `first` on."""
        for number, relative, indices in self.order.batches(epoch, first):
            epochs, positions = self.order.origins(epoch, relative)
            rows = indices.tolist() if self._batched else int(indices[0])
            yield Task(rows, epoch, number, positions, row_epochs=epochs if isinstance(epochs, np.ndarray) else None)

    def onwards(self, epoch: int, first: int) -> Iterator[Task]:
        """Yields the epoch's tasks, and then those of all later epochs."""
        while self.order.has_batches:
            yield from self.epoch(epoch, first)
            epoch, first = epoch + 1, 0


class SamplerTasks:
    """Tasks in the order of a user's sampler of indices, split among ranks as our own order is."""

    kind = "sampler"

    def __init__(self, sampler: Any, order: Order) -> None:
        self.order = order
        self.sampler = sampler
        self.overruns = False  # in the newest epoch the sampler may give more items than its length says

    def epoch(self, epoch: int, first: int) -> Iterator[Task]:
        """Yields the epoch's tasks from batch number `first` on."""
        items, self.overruns = draw(self.sampler, self.order.seed, epoch)
        return self._tasks(items, epoch, first)

    def _tasks(self, items: Iterator[Any], epoch: int, first: int) -> Iterator[Task]:
        order, number = self.order, 0
        head: list[Any] = []  # the first global batch, which pads the last one
        size = order.global_batch_size
        while batch := list(islice(items, size)):
            if len(batch) < size and order.drop_last:
                return
            head = head or batch
            if number >= first:
                start = number * size
                # Not the sampler's own length: it may have none, or a wrong one.
                positions = replace(order, length=start + len(batch)).positions(number)
                rows = [batch[at - start] if at >= start else head[at] for at in positions.tolist()]
                if rows:
                    yield Task(rows, epoch, number, positions)
            number += 1


class BatchSamplerTasks(SamplerTasks):
    """Tasks in the order of a user's batch sampler, or (not `batched`) of a user's sampler without batching."""

    kind = "batch_sampler"

    def __init__(self, sampler: Any, order: Order, batched: bool) -> None:
        super().__init__(sampler, order)
        self._batched = batched

    def _tasks(self, items: Iterator[Any], epoch: int, first: int) -> Iterator[Task]:
        position = 0
        for number, batch in enumerate(items):
            rows = len(batch) if self._batched else 1
            if number >= first:
                yield Task(batch, epoch, number, np.arange(position, position + rows))
            position += rows


def choose_tasks(loader: Any, own_order: Order | None) -> OwnTasks | SamplerTasks:
    """Returns the tasks of a seeded WorkerLoader: in `own_order`, or if that is None in the order of its sampler."""
    batched = loader.batch_sampler is not None
    if own_order is not None:
        return OwnTasks(own_order, batched)
    gives_batches = loader.batch_size is None
    if gives_batches and loader.world_size > 1:
        raise ValueError("world_size > 1 splits batches of batch_size: it cannot be used with a batch_sampler")
    sampler = loader.batch_sampler if gives_batches and batched else loader.sampler
    parts = loader.drop_last, loader.rank, loader.world_size, loader.pad
    order = Order(length_of(sampler), loader.batch_size or 1, False, loader.seed, *parts)
    return BatchSamplerTasks(sampler, order, batched) if gives_batches else SamplerTasks(sampler, order)


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
        return _replay(items, error), False
    return chain(items, _draw_on_demand(given, states, threading.get_ident())), True


def snapshot(indices: Any) -> Any:
    """Returns a copy of the indices, because some samplers fill the same list or array again for each batch."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    return copy(indices) if isinstance(indices, (list, dict, np.ndarray)) else indices


def _replay(items: list[Any], error: Exception | None) -> Iterator[Any]:
    yield from items
    if error is not None:
        raise SamplerError from error


def _draw_on_demand(items: Iterator[Any], states: Any, thread: int) -> Iterator[Any]:
    """Yields the items; in the given thread, each is drawn with the global generators continuing from `states`.

    Another thread, such as a preloader's, must not touch the global generators: the training loop draws from them.
    """
    while True:
        try:
            if threading.get_ident() != thread:
                _warn_of_unseeded_drawing()
                item = next(items, END)
            else:
                with preserved_globals():
                    restore_globals(states)
                    item = next(items, END)
                    states = global_states()
        except Exception as error:
            raise SamplerError from error
        if item is END:
            return
        yield snapshot(item)


@cache
def _warn_of_unseeded_drawing() -> None:
    log.warning(
        "a sampler without a length, or past its length, is iterated in a thread, where the loader does not seed the "
        "global generators: if it draws from them, the order differs from run to run"
    )
