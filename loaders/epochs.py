"""What loaders that make their own epochs share: the public face, and one iterator at a time.

A loader derives from EpochLoader and says how an epoch's batches are made; order, epochs and state are kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

from loaders.order import Order
from loaders.progress import Progress
from loaders.stream import OwnOrder


class EpochLoader:
    """Batches of a map-style dataset in our own order; `iter()` ends the iterator before.

    Raises TypeError for a dataset without a length, ValueError for a batch without a sample.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        pad: bool = True,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(self).__name__} needs a map-style dataset and {type(dataset).__name__} has no __len__: "
                "use torch's own DataLoader for an iterable one"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch has at least one sample")
        self.seed = seed
        self._dataset = dataset
        self._order = Order(len(dataset), batch_size, shuffle, seed, drop_last, rank, world_size, pad)
        self._progress = Progress(self._order)
        self._sampler = OwnOrder(self._order)
        self._sampler.progress = self._progress
        self._iterator: EpochIterator | None = None
        self._closed = False

    def _prepare(self) -> None:
        """Makes what epochs need and the loader does not have yet; where this raises, no epoch has begun."""

    def _open(self, epoch: int, first: int) -> EpochIterator:
        """The batches of epoch `epoch` from number `first` on."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: make a new one")
        self._end_epoch()
        self._prepare()
        self._iterator = self._open(*self._progress.begin())
        return self._iterator

    def __next__(self) -> Any:
        if self._iterator is None or self._iterator.ended:
            iter(self)
        assert self._iterator is not None
        return next(self._iterator)

    @property
    def dataset(self) -> Any:
        return self._dataset

    @property
    def sampler(self) -> OwnOrder:
        return self._sampler

    @property
    def batch_sampler(self) -> BatchSampler:
        return BatchSampler(self._sampler, self._order.batch_size, drop_last=False)  # what is dropped, `sampler` lacks

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch that the next `iter()` runs."""
        self._progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the epoch stands, counted in global samples delivered: plain JSON."""
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what the next `iter()` runs. Raises ValueError for a state of another seed, length or global batch."""
        self._progress.load_state_dict(state)
        self._end_epoch()

    def stats(self) -> dict[str, Any]:
        """Nothing: this loader keeps no figures."""
        return {}

    def close(self) -> None:
        """Ends the epoch; batches that were delivered stay valid. Idempotent, in any state."""
        self._closed = True
        self._end_epoch()

    def __enter__(self) -> EpochLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_epoch(self) -> None:
        if self._iterator is not None:
            self._iterator.end()
            self._iterator = None


class EpochIterator:
    """One epoch of (number, batch): counts what the consumer receives, and can be ended from outside."""

    def __init__(self, batches: Iterator[tuple[int, Any]], progress: Progress) -> None:
        self._batches: Iterator[tuple[int, Any]] | None = batches
        self._progress = progress
        self.ended = False
        self.is_waiting = False  # a thread is inside next()

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        batches = self._batches
        if batches is None:
            if self.ended:
                raise StopIteration
            raise RuntimeError("this epoch was ended by a newer iter(), by load_state_dict() or by close()")
        self.is_waiting = True
        try:
            number, batch = next(batches)
        except StopIteration:
            self._batches, self.ended = None, True
            self._progress.finish()
            raise
        finally:
            self.is_waiting = False
        self._progress.delivered(number)  # a batch that failed was skipped; a timeout is none
        return batch

    def end(self) -> None:
        self._batches = None
