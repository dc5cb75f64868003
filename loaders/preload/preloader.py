"""Loads batches ahead in a thread and copies them on a CUDA stream, so that a step finds its batch on the device.

The idea is from PreDataLoader and Apex's data_prefetcher.
Invariant: only one thread at a time uses the loader: the preloader's while an epoch runs, else the consumer's.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch

from ..arguments import as_index
from ..background import stop_at_exit
from ..base import EpochIterator, Position
from ..optional_methods import Closeable, OptionalMethods, raise_missing
from ..samplers import pass_on_epoch
from ..timeline import Timeline
from .device_copy import DeviceCopier, Transform
from .epoch import PreloadedEpoch

log = logging.getLogger(__name__)


class StateMethods(OptionalMethods):
    """The methods of a Preloader whose loader has them too."""

    def state_dict(self: Any) -> dict[str, Any]:
        """Returns the loader's state after the last batch that the consumer received."""
        if (state := self._unfinished()) is not None:
            return dict(state)
        self._pass_on_epoch()
        return dict(self.loader.state_dict())

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        """Sets where the next `iter()` resumes; ends a running epoch."""
        self._end_epoch(to_continue=True)
        self.loader.load_state_dict(state)
        self._named_epoch = self._last_state = None


class Preloader(Closeable):
    """Batches of `loader` on `device`, transformed; `iter()` ends the previous epoch.

    loader: any iterable of nested batches, the stock DataLoader for example. Tensors of any dtype and layout are moved
        to `device`; everything else stays as it is. A new `iter()` of the loader itself ends the
        preloader's epoch, if it ends the loader's.
    depth: how many batches a thread prepares ahead; 0: `next()` prepares its batch itself.
    transform: `transform(batch, random)` runs once per batch on the device, on the side stream, and returns the
        transformed batch. `random` is a `loaders.Random` keyed by (seed, epoch, batch number, rank).

    Batches are made ahead, so neither the loader nor the transform may fill the memory of a batch again: yield a copy.
    If the loader or the transform raises an error, `next()` raises it where the batch would have come; the epoch can
    go on after it if the loader's can. `next()` also raises ValueError for a batch whose tensors are on several
    devices, and torch.OutOfMemoryError if the device has no memory for a batch. `loaders.preload.device_copy` says
    what a consumer has to know about streams, CUDA graphs and autocast.

    Raises ValueError for a wrong depth, RuntimeError for a device that does not exist.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device | str = "cuda",
        depth: int = 2,
        transform: Transform | None = None,
    ) -> None:
        if as_index(depth) < 0:
            raise ValueError(f"depth={depth!r}: give the number of batches to prepare ahead, or 0 for none")
        StateMethods.give(self, hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"))
        self.loader = loader
        self.depth = depth
        self._copier = DeviceCopier(device, transform, depth)
        self._epoch: PreloadedEpoch | None = None
        self._epoch_number = 0  # of the next epoch, for a loader that does not count its epochs itself
        self._named_epoch: int | None = None  # given to set_epoch, and not passed on to the loader yet
        self._last_state: dict[str, Any] | None = None  # of the last epoch, where its consumer left it early
        self._closed = False

    def __len__(self) -> int:
        """Batches of the loader's next epoch, if the loader has a length."""
        return len(self.loader)

    def __iter__(self) -> EpochIterator:
        if self._closed:
            raise RuntimeError("this Preloader is closed: make a new one")
        self._end_epoch(to_continue=True)
        if self._last_state is not None and "places" in self._last_state:
            # Streams go on where the consumer left the epoch, and not where the thread did.
            self.loader.load_state_dict(self._last_state)
            self.loader.set_epoch(self._last_state["epoch"] + 1)
        self._pass_on_epoch()
        self._last_state = None
        self._epoch = self._open_epoch()
        stop_at_exit(self)
        return EpochIterator(self._epoch, self._epoch.position, self._epoch.length, owner=self)

    def __next__(self) -> Any:
        """Returns the next batch of the running epoch, or of a new one if none is running."""
        if self._epoch is None or self._epoch.position.finished:
            return next(iter(self))
        return next(EpochIterator(self._epoch, self._epoch.position))

    @property
    def device(self) -> torch.device:
        return self._copier.device

    @property
    def timeline(self) -> Timeline | None:
        """Records what the preloader and the loader's workers do; set it before the first epoch."""
        return self._copier.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._copier.timeline = timeline
        if hasattr(self.loader, "timeline"):
            self.loader.timeline = timeline

    dataset = property(attrgetter("loader.dataset"))
    sampler = property(attrgetter("loader.sampler"))
    batch_sampler = property(attrgetter("loader.batch_sampler"))

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next `iter()` runs: calls `set_epoch` of the loader, or else of its samplers."""
        self._named_epoch = epoch
        if not self._is_running():
            self._pass_on_epoch()

    def __getattr__(self, name: str) -> Any:
        raise_missing(self, name)

    def stats(self) -> dict[str, Any]:
        """Returns the loader's figures and, under "preloader", the preloader's.

        batches: delivered. wait_seconds: how long the consumer waited for them. loader_wait_seconds, copy_seconds,
        transform_seconds: how long the host was in the loader's next(), in copying, in the transform. queued,
        mean_queued: batches in the queue, now and on average.
        """
        inner = self.loader.stats() if hasattr(self.loader, "stats") else {}
        figures = self._copier.figures
        queued = 0 if self._epoch is None else self._epoch.queued
        mean_queued = figures["queued"] / max(1, figures["batches"])
        return {**inner, "preloader": {**figures, "queued": queued, "mean_queued": mean_queued}}

    def close(self) -> None:
        """Stops the thread and closes the loader. May be called repeatedly, in any state."""
        self._closed = True
        self._end_epoch()
        self._close_loader()

    def stop(self, deadline: float) -> None:
        """Stops the thread at the interpreter's exit, also if it is inside the loader's next()."""
        if self._epoch is not None:
            with suppress(Exception):  # the program is over: nobody could handle it
                self._epoch.end(getattr(self.loader, "close", lambda: None), max(0, deadline - time.monotonic()))

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled and copied: all but the thread and the epoch, whose state a copy begins with."""
        return {**vars(self), "_epoch": None, "_last_state": self._unfinished()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __del__(self) -> None:
        epoch: PreloadedEpoch | None = getattr(self, "_epoch", None)
        if epoch is not None:
            epoch.end(lambda: None)

    def _open_epoch(self) -> PreloadedEpoch:
        """Begins the loader's epoch. It calls iter(loader) here, so that the calling thread starts the workers."""
        batches = self._copier.open(self.loader)
        try:
            state, state_of = self.loader.state_dict(), self.loader.state_dict
        except (AttributeError, RuntimeError, ValueError):  # the loader has no state, or its order cannot be resumed
            state, state_of = None, lambda: None
        epoch, first = self._epoch_number, 0
        if state is not None and "global_batch_size" in state:
            epoch, first = state["epoch"], state["samples"] // state["global_batch_size"]
        self._epoch_number = epoch + 1
        of = getattr(self.loader, "_added", self.loader)  # a WorkerLoader's own attributes may be the program's
        whose = getattr(of, "seed", None) or 0, getattr(of, "rank", 0)
        return PreloadedEpoch(batches, self._copier, self.depth, Position(epoch, first), state_of, state, *whose)

    def _unfinished(self) -> dict[str, Any] | None:
        """Returns the loader's state after the consumer's last batch, if the newest epoch has further ones."""
        if self._epoch is None:
            return self._last_state
        return self._epoch.state if self._is_running() and not self._epoch.is_over() else None

    def _is_running(self) -> bool:
        return self._epoch is not None and not self._epoch.position.finished

    def _pass_on_epoch(self) -> None:
        """Calls the loader's `set_epoch`, or else that of its samplers, with the epoch that the user has set."""
        epoch, self._named_epoch = self._named_epoch, None
        if epoch is None:
            return
        self._epoch_number = epoch
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
        else:
            pass_on_epoch(epoch, getattr(self.loader, "batch_sampler", None), getattr(self.loader, "sampler", None))

    def _end_epoch(self, to_continue: bool = False) -> None:
        """Stops the thread. `to_continue`: the loader is used again, so wait until its next() returns."""
        if self._epoch is None:
            return
        self._last_state = self._unfinished()
        if not self._epoch.end(None if to_continue else self._close_loader):
            log.warning("the preloader's thread still waits for the loader's next() or the device: it was left behind")
        self._epoch = None

    def _close_loader(self) -> None:
        if hasattr(self.loader, "close"):
            try:
                self.loader.close()
            except ValueError as error:  # a generator cannot be closed while a thread runs it
                log.warning("the preloader's loader could not be closed: %s", error)
