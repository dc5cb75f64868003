"""Delivers a few batches again and again, to measure what training costs if data are free.

No loader can reach more images/s than this one, so the difference is the most that a better loader could gain (SPDL
calls this headspace analysis). It is for measuring only: the model sees almost none of the data.
"""

from __future__ import annotations

import logging
from itertools import islice, repeat
from typing import Any

from .epoch_loader import EpochLoader, TaskSource
from .nested import rows
from .workers.tasks import Task

log = logging.getLogger(__name__)

COUNT = 8  # batches kept: too many for the processor's caches, which would make steps look too fast


class CachedLoader(EpochLoader):
    """Delivers the first COUNT batches of `loader` in turn; an epoch has as many batches as one of `loader`.

    `loader` is any loader of this package; the other arguments are those that it was made with. It is read when the
    first epoch begins, and then closed. Epochs and state are counted as `loader` would count them. Only full batches
    are kept. They are delivered without a copy, so a step must not write to them.
    """

    def __init__(self, loader: Any, batch_size: int, **order: Any) -> None:
        super().__init__(loader.dataset, batch_size, **order)
        self._loader = loader
        self._cache: list[Any] = []

    def stats(self) -> dict[str, Any]:
        """Returns {"cached": {"batches": how many are kept}}."""
        return {"cached": {"batches": len(self._cache)}}

    def close(self) -> None:
        """Drops the batches and closes the loader inside. May be called repeatedly, in any state."""
        super().close()
        self._cache = []
        self._loader.close()

    def _open(self, epoch: int, first: int) -> TaskSource:
        cache, numbers = self._cache, range(first, len(self))
        return TaskSource(
            lambda task: cache[(task.number or 0) % len(cache)], map(Task, repeat(()), repeat(epoch), numbers)
        )

    def _prepare(self) -> None:
        if self._cache or not len(self):
            return
        self._loader.set_epoch(self._epochs.upcoming()[0])
        batches = list(islice(self._loader, COUNT))
        self._loader.close()
        full = max(map(rows, batches))
        self._cache = [batch for batch in batches if rows(batch) == full]
        log.warning(
            "loader=cached trains on the same %d batches again and again, to show what training costs with free data: "
            "its accuracy means nothing",
            len(self._cache),
        )
