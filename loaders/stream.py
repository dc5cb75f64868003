"""The tasks of each epoch of a seeded WorkerLoader: in our own order, or in a given sampler's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from loaders.order import Order
from loaders.progress import Progress
from loaders.randomness import fold
from loaders.reading import Task


class OwnOrder:
    """Our order as a sampler: this rank's indices in the epoch that `progress` stands at."""

    progress: Progress

    def __init__(self, order: Order) -> None:
        self.order = order

    def __len__(self) -> int:
        last = len(self.order) - 1
        return last * self.order.batch_size + len(self.order.positions(last)) if last >= 0 else 0

    def __iter__(self) -> Iterator[int]:
        epoch = self.progress.state_dict()["epoch"]
        for _, _, indices in self.order.batches(epoch):
            yield from indices.tolist()


class TaskStream:
    """The tasks of each epoch of `loader`, a WorkerLoader."""

    def __init__(self, loader: Any) -> None:
        self._batched = loader._auto_collation
        own_order = isinstance(loader.sampler, OwnOrder)
        self._drop_last = loader.drop_last
        # What is iterated over: nothing (our own order), indices, or whole tasks (of a batch sampler, or unbatched).
        self._given = None if own_order else loader.sampler if loader.batch_size is not None else loader._index_sampler
        self._gives_tasks = loader.batch_size is None
        if self._given is not None and self._gives_tasks and loader.world_size > 1:
            raise ValueError("world_size > 1 shares out batches of batch_size: it does not go with a batch_sampler")
        self._generator = None
        random_part = getattr(self._given, "sampler", self._given)
        if random_part is not None and getattr(random_part, "generator", loader) is None:
            # Or it would draw from the global generator, and differ at every run.
            random_part.generator = self._generator = torch.Generator()
        if own_order:
            self.order = loader.sampler.order
            return
        self.order = Order(
            len(self._given) if hasattr(self._given, "__len__") else sys.maxsize,
            loader.batch_size or 1,
            False,
            loader.seed,
            loader.drop_last,
            loader.rank,
            loader.world_size,
            loader.pad,
        )

    def tasks(self, epoch: int, first: int) -> Iterator[Task]:
        """The epoch's tasks from batch number `first` on."""
        if self._given is None:
            return self._in_own_order(epoch, first)
        if hasattr(self._given, "set_epoch"):
            self._given.set_epoch(epoch)
        if self._generator is not None:
            self._generator.manual_seed(int(fold(self.order.seed, epoch) >> np.uint64(1)))
        return self._as_given(epoch, first) if self._gives_tasks else self._shared_out(epoch, first)

    def onwards(self, epoch: int, first: int) -> Iterator[Task]:
        """The epoch's tasks, and those of all later epochs."""
        while True:
            empty = True
            for task in self.tasks(epoch, first):
                empty = False
                yield task
            if empty and first == 0:
                return
            epoch, first = epoch + 1, 0

    def _in_own_order(self, epoch: int, first: int) -> Iterator[Task]:
        for number, positions, indices in self.order.batches(epoch, first):
            yield Task(indices.tolist() if self._batched else int(indices[0]), epoch, number, positions)

    def _as_given(self, epoch: int, first: int) -> Iterator[Task]:
        position = 0
        for number, indices in enumerate(self._given):
            rows = len(indices) if self._batched else 1
            if number >= first:
                yield Task(indices, epoch, number, np.arange(position, position + rows))
            position += rows

    def _shared_out(self, epoch: int, first: int) -> Iterator[Task]:
        order, head = self.order, []
        for number, batch in enumerate(BatchSampler(self._given, order.global_batch_size, self._drop_last)):
            head = head or batch
            if number < first:
                continue
            start = number * order.global_batch_size
            alone = order.world_size == 1  # then the sampler may do without a length
            positions = np.arange(start, start + len(batch)) if alone else order.positions(number)
            rows = [batch[place - start] if place >= start else head[place] for place in positions.tolist()]
            if rows:
                yield Task(rows, epoch, number, positions)
