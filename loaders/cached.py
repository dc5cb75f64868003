"""What training would cost if data were free: a few batches, again and again.

Compare a loader's images/s with this one's: the rest is what a better loader could still give (after SPDL's headspace
analysis). A ceiling to measure, and not a way to train: the model sees next to nothing of the data.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from loaders.batch import rows
from loaders.epochs import EpochIterator, EpochLoader

log = logging.getLogger(__name__)

COUNT = 8  # batches kept; enough that caches of the processor do not make steps faster than they are


class CachedLoader(EpochLoader):
    """The first COUNT batches of `loader`, handed out in turns for as many batches an epoch as there would be.

    `loader` is any loader of this package, over a dataset in the order that the other arguments describe; it is read
    when the first epoch begins, and closed at once. Epochs and state are counted as that loader would. Only batches
    of full size are kept. They are handed out themselves, without a copy: a step must not write to them.
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

    def _open(self, epoch: int, first: int) -> EpochIterator:
        cache = self._cache
        return EpochIterator(((n, cache[n % len(cache)]) for n in range(first, len(self))), self._progress)

    def _prepare(self) -> None:
        if self._cache or not len(self):
            return
        self._loader.set_epoch(self.state_dict()["epoch"])
        batches = list(islice(self._loader, COUNT))
        self._loader.close()
        full = max(map(rows, batches))
        self._cache = [batch for batch in batches if rows(batch) == full]
        log.warning(
            "loader=cached trains on the same %d batches again and again, to show what training costs with free data: "
            "its accuracy means nothing",
            len(self._cache),
        )
