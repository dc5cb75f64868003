"""The stock torch.utils.data.DataLoader, given its best settings: the baseline that others are compared with.

A thin adapter: the order is ours (its batch sampler), so are epochs and state; fetching, workers, collating and
pinning are torch's. The dataset's random numbers are seeded once a batch from (seed, epoch, batch), so that its
bytes do not depend on the number of workers and a resumed epoch goes on as it would have.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from loaders.order import Order
from loaders.pools.inline import warn_of_unseeded_reading
from loaders.progress import Progress
from loaders.randomness import fold, preserved_globals, seed_globals


class TorchLoader:
    """Batches of a map-style dataset, on the host, as torch's default collate makes them.

    One iterator at a time: `iter()` ends the one before. `persistent_workers` is on, so a second epoch starts warm.
    Raises what DataLoader raises; a dataset's error comes out of `next()` with the worker's traceback.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        timeout: float = 0,
        drop_last: bool = False,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
        pad: bool = True,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"TorchLoader needs a map-style dataset and {type(dataset).__name__} has no __len__: "
                "use torch's own DataLoader for an iterable one"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch has at least one sample")
        self.seed = seed
        self._dataset = dataset
        self._order = Order(len(dataset), batch_size, shuffle, seed, drop_last, rank, world_size, pad)
        self._progress = Progress(self._order)
        self._batches = _KeyedBatches(self._order)
        workers: dict[str, Any] = {}
        if num_workers > 0:
            # Fork is the fastest start, and since Python 3.14 no longer the default where it is safe enough.
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
            workers = {
                "prefetch_factor": prefetch_factor,
                "persistent_workers": True,
                "multiprocessing_context": context,
                "timeout": timeout,
            }
        self._seeded = _Seeded(dataset)
        self._loader: DataLoader[Any] | None = DataLoader(
            self._seeded,
            batch_sampler=self._batches,
            collate_fn=_collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # without one, every epoch would draw from the global generator
            **workers,
        )
        self._iterator: _Iterator | None = None

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        if self._loader is None:
            raise RuntimeError("this TorchLoader is closed: make a new one")
        if self._iterator is not None:
            self._iterator.end()
        self._batches.epoch, self._batches.first = self._progress.begin()
        self._seeded.thread = threading.get_ident()
        self._iterator = _Iterator(iter(self._loader), self._progress)
        return self._iterator

    def __next__(self) -> Any:
        if self._iterator is None or self._iterator.ended:
            iter(self)
        assert self._iterator is not None
        return next(self._iterator)

    @property
    def dataset(self) -> Dataset[Any]:
        return self._dataset

    @property
    def batch_sampler(self) -> _KeyedBatches:
        return self._batches

    @property
    def sampler(self) -> _KeyedBatches:
        """The batch sampler: order and batches are made together here."""
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        self._progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._progress.load_state_dict(state)
        if self._iterator is not None:
            self._iterator.end()
            self._iterator = None

    def stats(self) -> dict[str, Any]:
        """Nothing: the stock DataLoader keeps no figures."""
        return {}

    def close(self) -> None:
        """Ends the workers, also those that hang. Idempotent."""
        if self._iterator is not None:
            self._iterator.end()
        workers = getattr(self._loader, "_iterator", None)  # persistent ones; torch has no public way to end them
        if workers is not None:
            if self._iterator is not None and self._iterator.is_waiting:
                for worker in workers._workers:  # the thread that waits in vain finds them gone, and does the rest
                    worker.terminate()
            else:  # asked to: one that is killed inside an event that they share with us would hold us up for ever
                workers._shutdown_workers()
        self._iterator = self._loader = None

    def __enter__(self) -> TorchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Iterator:
    """One epoch: counts what the consumer receives, and can be ended from outside."""

    def __init__(self, batches: Iterator[Any], progress: Progress) -> None:
        self._batches: Iterator[Any] | None = batches
        self._progress = progress
        self.ended = False
        self.is_waiting = False  # a thread is inside next()

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            if self.ended:
                raise StopIteration
            raise RuntimeError("this epoch was ended by a newer iter() or by close()")
        batches, self.is_waiting = self._batches, True
        try:
            number, batch = next(batches)
        except StopIteration:
            self._batches, self.ended = None, True
            self._progress.finish()
            raise
        except Exception:
            if self._batches is None:  # it was closed meanwhile, which has ended the workers
                batches._shutdown_workers()
            raise
        finally:
            self.is_waiting = False
        self._progress.delivered(number)  # a batch that failed was skipped; a timeout is none
        return batch

    def end(self) -> None:
        self._batches = None


class _Numbered(list):
    """A batch's dataset indices or samples, with its number in the epoch and the key of its random numbers."""

    def __init__(self, items: Iterable[Any], number: int, key: int) -> None:
        super().__init__(items)
        self.number, self.key = number, key


def _collate(samples: _Numbered) -> tuple[int, Any]:
    return samples.number, default_collate(list(samples))


class _KeyedBatches:
    """A batch sampler for DataLoader: the batches of `epoch` from number `first` on."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.epoch, self.first = 0, 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[_Numbered]:
        epoch, order = self.epoch, self._order
        for number, _, indices in order.batches(epoch, self.first):
            yield _Numbered(indices.tolist(), number, int(fold(order.seed, epoch, number, order.rank)))


class _Seeded(Dataset):
    """The dataset, with the global generators seeded from a batch's key while its samples are read."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self.thread: int | None = None  # that of the training loop
        self._read_all = getattr(dataset, "__getitems__", None)

    def __getitems__(self, batch: _Numbered) -> _Numbered:
        if get_worker_info() is not None:
            seed_globals(batch.key)
            return self._read(batch)
        if threading.get_ident() == self.thread:
            with preserved_globals():  # the model's own draws must not notice
                seed_globals(batch.key)
                return self._read(batch)
        warn_of_unseeded_reading()
        return self._read(batch)

    def _read(self, batch: _Numbered) -> _Numbered:
        if self._read_all is not None:
            samples = self._read_all(list(batch))
        else:
            samples = [self._dataset[index] for index in batch]
        return _Numbered(samples, batch.number, batch.key)
