"""Measures what training costs if data are free: delivers a few batches again and again.

A loader cannot reach more images/s than this one: the difference is what a better loader could gain (after SPDL's
headspace analysis). It is for measuring only: the model sees almost none of the data.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from .epoch_loader import EpochLoader, IteratorSource
from .nested import rows

log = logging.getLogger(__name__)

COUNT = 8  # batches kept: so many that the processor's caches do not make steps look too fast


class CachedLoader(EpochLoader):
    """Delivers the first COUNT batches of `loader` in turn; an epoch has as many batches as the loader's.

    `loader` is any loader of this package, over a dataset in the order that the other arguments describe. It is read
    when the first epoch begins, and then closed. Epochs and state are counted as that loader counts them. Only full
    batches are kept. They are delivered without a copy, so a step must not write to them.
    """

    def __init__(self, loader: Any, batch_size: int, **order: Any) -> None:
        super().__init__(loader.dataset, batch_size, **order)
        self._loader = loader
        self._cache: list[Any] = []

    def stats(self) -> dict[str, Any]:
        """{"cached": {"batches": how many are kept}}."""
        return {"cached": {"batches": len(self._cache)}}

    def close(self) -> None:
        super().close()
        self._cache = []
        self._loader.close()

    def _open(self, epoch: int, first: int) -> IteratorSource:
        cache = self._cache
        return IteratorSource((number, cache[number % len(cache)]) for number in range(first, len(self)))

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
