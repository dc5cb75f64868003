"""Samplers that give a loader's order to other loaders, and functions for samplers that users pass in."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from .order import Order


class OrderSampler:
    """A loader's order as a sampler: this rank's indices, epoch by epoch.

    Each `iter()` gives the next epoch, from 0, or the one that `set_epoch` named. The loader that it belongs to does
    not use this count, so other loaders may iterate the sampler.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self._next = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next `iter()`."""
        self._next = int(epoch)

    def __len__(self) -> int:
        last = self.order.batches_in(self._next) - 1
        return last * self.order.batch_size + len(self.order.positions(last, self._next)) if last >= 0 else 0

    def __iter__(self) -> Iterator[int]:
        epoch, self._next = self._next, self._next + 1
        return self._indices(epoch)

    def _indices(self, epoch: int) -> Iterator[int]:
        for _, _, indices in self.order.batches(epoch):
            yield from indices.tolist()


def own_batch_sampler(sampler: OrderSampler, batch_size: int, drop_last: bool) -> BatchSampler:
    """Returns a BatchSampler with a `set_epoch`. It is of torch's own class, which libraries know how to rebuild."""
    batches: Any = BatchSampler(sampler, batch_size, drop_last)
    batches.set_epoch = sampler.set_epoch
    return batches  # type: ignore[no-any-return]


def pass_on_epoch(epoch: int, *samplers: Any) -> None:
    """Calls `set_epoch` of the given samplers, and of the samplers inside them, where they have it."""
    for sampler in _with_inner(samplers):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def length_of(sampler: Any) -> int:
    """Returns the sampler's length, or sys.maxsize if it has none."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return sys.maxsize


def own_generator_of(*samplers: Any) -> str | None:
    """Returns "Class.attribute" of the first random generator in samplers, those inside them, or datasets; or None."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    for sampler in _with_inner(samplers):
        for name, value in getattr(sampler, "__dict__", {}).items():
            if isinstance(value, kinds):
                return f"{type(sampler).__name__}.{name}"
    return None


def check_resumable(*samplers: Any) -> None:
    """Raises ValueError if a sampler holds a random generator, whose state the loader could not save."""
    if generator := own_generator_of(*samplers):
        raise ValueError(
            f"{generator} is a random generator, and the loader cannot save its state: leave it out (the loader "
            "then seeds the global generators while it draws from the sampler), or use the loader's shuffle=True"
        )


def _with_inner(samplers: Iterable[Any]) -> Iterator[Any]:
    """Yields each sampler, followed by the samplers inside it; none of them twice."""
    seen: set[int] = set()
    for sampler in samplers:
        while sampler is not None and id(sampler) not in seen:
            seen.add(id(sampler))
            yield sampler
            sampler = getattr(sampler, "sampler", None)
