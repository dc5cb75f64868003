"""The stock DataLoader over an iterable dataset: the baseline that WorkerLoader's streams are compared with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from .optional_methods import Closeable
from .workers.streams import StreamError

log = logging.getLogger(__name__)


class TorchStream(Closeable):
    """Batches as torch reads them, one worker after the other; torch's workers decide which.

    steps_per_epoch: batches of an epoch, which begins where the one before has ended; None: all of a pass.
    settings: arguments of DataLoader. A state has the epoch and the batch, but not the place in the stream.
    """

    def __init__(self, dataset: Any, batch_size: int, seed: int, steps_per_epoch: int | None, **settings: Any) -> None:
        self.dataset, self.batch_size, self._steps = dataset, batch_size, steps_per_epoch
        own = torch.Generator().manual_seed(seed)  # else each pass would draw from the global one
        self._loader = DataLoader(dataset, batch_size, generator=own, **settings)
        self._pass: Iterator[Any] = iter(())
        self._epoch = self._batch = 0

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError(f"{type(self.dataset).__name__} is a stream, which has no length")
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        if self._steps is None:
            yield from self._loader
            return
        if self._batch == self._steps:
            self.set_epoch(self._epoch + 1)
        while self._batch < self._steps:
            if (batch := next(self._pass, None)) is None:
                self._pass = iter(self._loader)
                if (batch := next(self._pass, None)) is None:
                    raise StreamError(f"{type(self.dataset).__name__} gave no samples: does its __iter__ begin anew?")
            self._batch += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next `iter()` runs: its number, as the stream goes on."""
        if epoch != self._epoch:
            self._epoch, self._batch = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and how many samples of it were delivered: plain JSON."""
        at_end = self._batch == self._steps
        return {"epoch": self._epoch + at_end, "samples": 0 if at_end else self._batch * self.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the epoch and the batch that come next. The stream begins anew."""
        self._epoch, self._batch = state["epoch"], state["samples"] // self.batch_size
        log.warning("loader=torch does not know where it was in the stream: it begins anew")

    def close(self) -> None:
        """Stops the workers. May be called repeatedly, in any state."""
        if (iterator := getattr(self._loader, "_iterator", None)) is not None:
            iterator._shutdown_workers()
