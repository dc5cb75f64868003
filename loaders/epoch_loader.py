"""The base of the loaders that do not use the engine in workers/: torch's, the resident and the cached one."""

from __future__ import annotations

from copy import copy
from typing import Any

from .arguments import checked_last_batch
from .base import Closeable, EpochIterator, Epochs, Position, Source
from .order import Order
from .samplers import OrderSampler, own_batch_sampler


class EpochLoader(Closeable):
    """Delivers batches of a map-style dataset in our order.

    A subclass makes an epoch's batches in `_open`. `iter()` ends the previous iterator. The arguments, which decide
    the order, mean what they mean in WorkerLoader.
    Raises TypeError for a dataset without a length, ValueError for a batch size below 1.
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
        last_batch: str | None = None,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(self).__name__} needs a map-style dataset, and {type(dataset).__name__} has no __len__: "
                "use torch's own DataLoader for an iterable dataset"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give a number from 1")
        drop_last, rollover = checked_last_batch(last_batch, drop_last)
        order = Order(len(dataset), batch_size, shuffle, seed, drop_last, rank, world_size, pad, rollover)
        self.dataset = dataset
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, order.seed, rank, world_size
        self._order = order
        self._epochs = Epochs(order, order.kind)
        self.sampler = OrderSampler(order)
        self.batch_sampler = own_batch_sampler(self.sampler, batch_size, drop_last)
        self._iterator: EpochIterator | None = None
        self._closed = False

    def _prepare(self) -> None:
        """Makes what all epochs need. It is called before each epoch begins; if it raises, the epoch has not begun."""

    def _open(self, epoch: int, first: int) -> Source:
        """Returns the batches of epoch `epoch` from number `first` on."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Batches of the epoch that the next `iter()` runs, on this rank."""
        return self._order.batches_in(self._epochs.upcoming()[0])

    def __iter__(self) -> EpochIterator:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: make a new one")
        if len(self.dataset) != self._order.length:
            raise RuntimeError(
                f"{type(self.dataset).__name__} had {self._order.length:,} samples when this {type(self).__name__} "
                f"was made, and has {len(self.dataset):,} now: make a new loader"
            )
        self._end_epoch()
        self._prepare()
        position = Position(*self._epochs.upcoming())
        self._iterator = EpochIterator(self._open(position.epoch, position.batch), position, len(self))
        self._epochs.begin(position)
        return self._iterator

    def __next__(self) -> Any:
        """Returns the next batch of the running epoch, or of a new one if none is running."""
        if self._iterator is None or self._iterator.position.finished:
            iter(self)
        assert self._iterator is not None
        return next(self._iterator)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next `iter()` runs."""
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, counted in samples delivered to all ranks: plain JSON."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what the next `iter()` runs. Raises ValueError for a state of another seed, length or global batch."""
        self._epochs.load_state_dict(state)
        self._end_epoch()

    def stats(self) -> dict[str, Any]:
        """Returns an empty dict: this loader keeps no figures."""
        return {}

    def close(self) -> None:
        """Ends the epoch; delivered batches stay valid. May be called repeatedly, in any state."""
        self._closed = True
        self._end_epoch()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and pickled: a copy has no iterator yet, and counts its own epochs."""
        return {**vars(self), "_epochs": copy(self._epochs), "_iterator": None}

    def _end_epoch(self) -> None:
        if self._iterator is not None:
            self._iterator.end()
            self._iterator = None
