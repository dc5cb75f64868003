"""The tasks of each epoch of a seeded WorkerLoader: in our own order, or in that of a user's sampler.

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


@dataclass(frozen=True)
class Task:
    """A batch to read. Without a seed it has indices only, and samples draw from the worker's own generators."""

    indices: Any  # a sequence of dataset indices, or without automatic batching a single one
    epoch: int | None = None
    number: int | None = None  # of the batch in its epoch
    positions: np.ndarray | None = None  # of its rows in the epoch, int64
    singly: bool = False  # read sample by sample: reading the whole batch crashed a worker
    without: frozenset[int] = frozenset()  # rows to leave out: reading them crashed workers
    row_epochs: np.ndarray | None = None  # of its rows, int64, where `positions` are in several epochs

    def random_key(self, rows: slice = slice(None)) -> tuple[Any, Any]:
        """Returns the epochs of rows and their positions in them, by which their random numbers are keyed."""
        assert self.epoch is not None and self.positions is not None
        return self.epoch if self.row_epochs is None else self.row_epochs[rows], self.positions[rows]


def unseeded_task(indices: Any) -> Task:
    """Returns the task of a batch, or sample, of a loader without a seed."""
    return Task(kept(indices))


class SamplerError(RuntimeError):
    """Its cause is an error that a user's sampler raised. (Other exceptions here come from signal handlers.)"""


class OwnTasks:
    """Tasks in our own order."""

    def __init__(self, order: Order, batched: bool) -> None:
        self.order = order
        self.kind = order.kind
        self._batched = batched

    def epoch(self, epoch: int, first: int) -> Iterator[Task]:
        """Yields the epoch's tasks from batch number `first` on."""
        for number, relative, indices in self.order.batches(epoch, first):
            epochs, positions = self.order.places(epoch, relative)
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
        self.overruns = False  # the newest epoch's sampler gives more than its length

    def epoch(self, epoch: int, first: int) -> Iterator[Task]:
        """Yields the epoch's tasks from batch number `first` on."""
        items = drawn(self.sampler, self.order.seed, epoch)
        self.overruns = isinstance(items, chain)  # with what has not been drawn yet
        return self._made_of(items, epoch, first)

    def _made_of(self, indices: Iterator[Any], epoch: int, first: int) -> Iterator[Task]:
        order, number = self.order, 0
        head: list[Any] = []
        size = order.global_batch_size
        while batch := list(islice(indices, size)):
            if len(batch) < size and order.drop_last:
                return
            head = head or batch
            if number >= first:
                start = number * size  # the sampler's length is not asked: it may have none, or a wrong one
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

    def _made_of(self, indices: Iterator[Any], epoch: int, first: int) -> Iterator[Task]:
        position = 0
        for number, batch in enumerate(indices):
            rows = len(batch) if self._batched else 1
            if number >= first:
                yield Task(batch, epoch, number, np.arange(position, position + rows))
            position += rows


def choose_tasks(loader: Any, own_order: Order | None) -> OwnTasks | SamplerTasks:
    """Returns the tasks of a seeded WorkerLoader: in our own order if there is one, else in its sampler's."""
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


def drawn(sampler: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Draws all items from a user's sampler now, with the global generators seeded from (seed, epoch) meanwhile.

    Its error comes out after the items before it. What it gives beyond its length is drawn as it is needed, as
    everything is of a sampler without a length: many samplers never end.
    """
    length = length_of(sampler)
    most = 0 if length == sys.maxsize else length + 1  # with one more a sampler of that length comes to its end
    items: list[Any] = []
    error = None
    with preserved_globals():
        seed_globals(int(fold(seed, epoch)))
        try:
            given = iter(sampler)
            for item in islice(given, most):
                items.append(kept(item))
        except Exception as raised:
            error = raised
        states = global_states()
    if error is not None or len(items) < most:
        return _replay(items, error)
    return chain(items, _drawn_on_demand(given, states, threading.get_ident()))


def kept(indices: Any) -> Any:
    """Returns the indices as they are now: some samplers fill the same list or array again for each batch."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    return copy(indices) if isinstance(indices, (list, dict, np.ndarray)) else indices


def _replay(items: list[Any], error: Exception | None) -> Iterator[Any]:
    yield from items
    if error is not None:
        raise SamplerError from error


def _drawn_on_demand(items: Iterator[Any], states: Any, thread: int) -> Iterator[Any]:
    # Another thread, a preloader's, must not touch the global generators, which the training loop draws from.
    while True:
        try:
            if threading.get_ident() != thread:
                _warn_of_unseeded_drawing()
                item = next(items, drawn)
            else:
                with preserved_globals():
                    restore_globals(states)
                    item = next(items, drawn)
                    states = global_states()
        except Exception as error:
            raise SamplerError from error
        if item is drawn:  # the default of next(): no sampler yields this function
            return
        yield kept(item)


@cache
def _warn_of_unseeded_drawing() -> None:
    log.warning(
        "a sampler without a length, or past its length, is iterated in a thread, where the loader does not seed the "
        "global generators: if it draws from them, the order differs from run to run"
    )
