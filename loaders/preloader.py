"""A thread and a CUDA stream between any loader and the training step: batches are on the device when asked for.

The thread takes batches from the loader, prepares each on the device (`loaders.staging`), and puts it with its state
and its error into a bounded queue; state and errors so reach the consumer with their batch. After PreDataLoader and
Apex's data_prefetcher; that a queue's item is (batch, state, error) is Grain's idea.

Invariant: only one thread at a time uses the loader, the consumer's while no epoch runs, else the preloader's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from loaders.batch import rows
from loaders.channel import Channel, Closed
from loaders.randomness import Random
from loaders.staging import Stage, Transform
from loaders.threads import start_thread, stop_at_exit

log = logging.getLogger(__name__)

# How long close() waits for the thread, which may be inside the loader's next(), before it closes the loader under it,
# and how long after that before it gives the thread up.
JOIN_SECONDS, GIVE_UP_SECONDS = 0.1, 2.0


class Preloader:
    """Batches of `loader` on `device`, `depth` of them prepared ahead by a thread; depth 0 prepares them inline.

    `loader` is any iterable of nested batches, the stock DataLoader for one. Tensors of any dtype and layout come
    out on `device`, everything else as it was. `transform(batch, random)` runs once a batch on the device, on the
    side stream, with a `loaders.randomness.Random` keyed by (seed, epoch, batch). Errors of the loader and of the
    transform come out of `next()` in their order, with their traceback; the epoch goes on after them if the
    loader's does. A batch on several devices is such an error, a ValueError; so is a device without memory for it,
    a torch.OutOfMemoryError. One epoch at a time: `iter()` ends the one before. What a consumer has to know of
    streams, CUDA graphs and autocast is said in `loaders.staging`.
    Raises ValueError for a bad depth, RuntimeError for a device that is not there.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device | str = "cuda",
        depth: int = 2,
        transform: Transform | None = None,
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ValueError(f"depth={depth!r}: give the number of batches to prepare ahead, or 0 for none")
        self.loader = loader
        self.depth = depth
        self._stage = Stage(device, transform, side_stream=depth > 0)
        self._epoch: _Inline | _Threaded | None = None
        self._epoch_number = 0  # for a loader that does not count its epochs itself
        self._named_epoch: int | None = None  # by set_epoch, while the thread had the loader
        self._last_state: dict[str, Any] | None = None  # of an epoch that was broken off, at its consumer
        self._batches, self._wait_seconds, self._queued = 0, 0.0, 0
        self._closed = False
        stop_at_exit(self)

    def __len__(self) -> int:
        """Batches an epoch, where the loader has a length."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise RuntimeError("this Preloader is closed: make a new one")
        self._end_epoch(to_go_on=True)
        self._pass_on_epoch()
        self._stage.begin()
        self._last_state = None
        source = self._open_source()
        self._epoch = _Threaded(source, self.depth) if self.depth else _Inline(source)
        return _Iterator(self, self._epoch)

    def __next__(self) -> Any:
        if self._epoch is None or self._epoch.finished:
            iter(self)
        return self._receive(self._epoch)

    @property
    def device(self) -> torch.device:
        return self._stage.device

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def sampler(self) -> Any:
        return self.loader.sampler

    @property
    def batch_sampler(self) -> Any:
        return self.loader.batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch that the next `iter()` runs, to the loader or, in a stock DataLoader, to its sampler."""
        self._named_epoch = epoch
        if not self._is_running():
            self._pass_on_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The loader's state as of the last batch that the consumer received."""
        if self._is_running() and self._epoch.state is not None:
            return self._epoch.state
        if self._last_state is not None:
            return self._last_state
        self._pass_on_epoch()
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets where the next `iter()` goes on; ends a running epoch."""
        self._end_epoch(to_go_on=True)
        self.loader.load_state_dict(state)
        self._named_epoch = self._last_state = None

    def stats(self) -> dict[str, Any]:
        """The loader's figures and, under "preloader", its own: batches received, seconds waited for them, seconds
        that moving and transforming took the host, and batches queued now and on average.
        """
        inner = self.loader.stats() if hasattr(self.loader, "stats") else {}
        own = {
            "batches": self._batches,
            "wait_seconds": self._wait_seconds,
            "busy_seconds": self._stage.busy_seconds,
            "queued": 0 if self._epoch is None else self._epoch.queued,
            "mean_queued": self._queued / max(1, self._batches),
        }
        return {**inner, "preloader": own}

    def close(self) -> None:
        """Stops the thread and closes the loader. Idempotent, in any state."""
        self._closed = True
        self._end_epoch()
        self._close_loader()

    def stop(self, deadline: float) -> None:
        """Ends the thread at the interpreter's exit, also where it is inside the loader's next()."""
        if self._epoch is not None:
            self._epoch.stop(deadline, getattr(self.loader, "close", lambda: None))

    def __enter__(self) -> Preloader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_epoch", None) is not None:
            self._epoch.close(lambda: None)

    def _open_source(self) -> _Source:
        """Begins the loader's epoch in the calling thread, from which its workers are started."""
        with self._stage.on_device():
            batches = iter(self.loader)
        try:
            state, state_of = self.loader.state_dict(), self.loader.state_dict
        except (AttributeError, RuntimeError, ValueError):  # it keeps none or, without a seed, refuses to give one
            state, state_of = None, lambda: None
        epoch, first = self._epoch_number, 0
        if state is not None and "global_batch_size" in state:
            epoch, first = state["epoch"], state["samples"] // state["global_batch_size"]
        self._epoch_number = epoch + 1
        seed = getattr(self.loader, "seed", None) or 0
        return _Source(batches, self._stage, self.depth, state, state_of, (seed, epoch), first)

    def _receive(self, epoch: _Inline | _Threaded) -> Any:
        began = time.perf_counter()
        item = epoch.get()
        self._wait_seconds += time.perf_counter() - began
        if item is None:
            raise StopIteration
        if item.error is not None:
            error, item.error = item.error, None  # or the error and the frames in its traceback hold each other
            try:
                raise error
            finally:
                del error
        self._batches += 1
        self._queued += epoch.queued
        return self._stage.hand_over(item.batch, item.ready)

    def _is_running(self) -> bool:
        return self._epoch is not None and not self._epoch.finished

    def _pass_on_epoch(self) -> None:
        """Tells the loader which epoch set_epoch named or, in a stock DataLoader, its sampler."""
        epoch, self._named_epoch = self._named_epoch, None
        if epoch is None:
            return
        self._epoch_number = epoch
        sampler, batch_sampler = getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)
        for owner in (self.loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
                return

    def _end_epoch(self, to_go_on: bool = False) -> None:
        """Stops the thread. Where the loader is `to_go_on`, the thread has to come back from it, and is waited for."""
        if self._epoch is None:
            return
        self._last_state = self._epoch.state if self._is_running() else None
        self._epoch.close(None if to_go_on else self._close_loader)
        self._epoch = None

    def _close_loader(self) -> None:
        if hasattr(self.loader, "close"):
            try:
                self.loader.close()
            except ValueError as error:  # of a generator that a thread is inside of
                log.warning("the preloader's loader could not be closed: %s", error)


class _Iterator:
    """One epoch as its consumer holds it; keeps the preloader alive as long as itself."""

    def __init__(self, preloader: Preloader, epoch: _Inline | _Threaded) -> None:
        self._preloader, self._epoch = preloader, epoch

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        return self._preloader._receive(self._epoch)


@dataclass
class _Item:
    """What the queue carries: a batch or an error, and the loader's state after it."""

    batch: Any = None
    ready: torch.cuda.Event | None = None
    state: dict[str, Any] | None = None
    error: BaseException | None = None


class _Source:
    """Makes the epoch's items, one a call, in whichever thread calls it; None at the end.

    It knows nothing of the preloader, which could otherwise never be collected while its thread runs.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        stage: Stage,
        depth: int,
        state: dict[str, Any] | None,
        state_of: Callable[[], dict[str, Any] | None],
        key: tuple[int, int],
        first: int,
    ) -> None:
        self.stage, self.depth, self.state = stage, depth, state
        self._batches, self._state_of = batches, state_of
        self._key, self._number = key, first

    def __call__(self) -> _Item | None:
        item = _Item()
        try:
            batch = next(self._batches)
        except StopIteration:
            return None
        except Exception as error:
            item.error = error
        try:
            item.state = self._state_of()
            if item.error is None:
                item.batch, item.ready = self.stage.prepare(batch, Random(*self._key, self._number))
        except StopIteration as error:  # out of next() it would pass for the epoch's end
            item.error = RuntimeError("the transform raised StopIteration")
            item.error.__cause__ = error
        except torch.OutOfMemoryError as error:
            item.error = torch.OutOfMemoryError(
                f"out of memory on {self.stage.device} while preparing a batch of {rows(batch)} samples with "
                f"depth={self.depth}: lower the batch size or the depth (loader.preload_depth)"
            )
            item.error.__cause__ = error
        except Exception as error:
            item.error = item.error or error
        self._number += 1
        return item


class _Inline:
    """An epoch without a thread: what is asked for is made in the call."""

    queued = 0

    def __init__(self, source: _Source) -> None:
        self._source: _Source | None = source
        self._stage = source.stage
        self.state = source.state
        self.finished = False

    def get(self) -> _Item | None:
        if self._source is None:
            return _nothing_more(self.finished)
        item = self._source()
        if item is None:
            self._source, self.finished = None, True
        else:
            self.state = item.state
        return item

    def close(self, unblock: Callable[[], None] | None = None) -> None:
        self._source = None
        self._stage.release_copied(wait=True)

    def stop(self, deadline: float, unblock: Callable[[], None]) -> None:
        pass


class _Threaded:
    """An epoch that a thread makes ahead, through a bounded queue."""

    def __init__(self, source: _Source, depth: int) -> None:
        self._channel = Channel(depth)
        self.state = source.state
        self.finished = False
        self._thread = start_thread("preloader", _fill, self._channel, source)

    @property
    def queued(self) -> int:
        return len(self._channel)

    def get(self) -> _Item | None:
        try:
            item = self._channel.get()
        except Closed:
            return _nothing_more(self.finished)
        if item is None:
            self.finished = True
            self.close()
        else:
            self.state = item.state
        return item

    def close(self, unblock: Callable[[], None] | None = None) -> None:
        """Stops the thread; waits for it, and with `unblock` not for ever: that is called to get it out of next()."""
        self._channel.close()
        if self._thread is threading.current_thread():
            return  # in a finaliser that the garbage collector ran there
        if unblock is None:
            self._thread.join()
            return
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            unblock()
            self._thread.join(GIVE_UP_SECONDS)
        if self._thread.is_alive():
            log.warning("the preloader's thread does not come back from its loader's next() and was left behind")

    def stop(self, deadline: float, unblock: Callable[[], None]) -> None:
        self._channel.close()
        self._thread.join(0.1)  # most are only waiting for room in the channel
        if self._thread.is_alive():
            with suppress(Exception):  # nobody is left to be told
                unblock()
        self._thread.join(max(0, deadline - time.monotonic()))


def _fill(channel: Channel, source: _Source) -> None:
    """The thread: puts the source's items into the channel until they end or it is closed."""
    with suppress(Closed):
        try:
            with source.stage.on_stream():
                while (item := source()) is not None:
                    channel.put(item)
                    del item  # the consumer's from now on: not to be kept alive while the next one is made
            channel.put(None)
        except Closed:
            pass
        except BaseException as error:
            channel.put(_Item(error=error))
            channel.put(None)
        finally:
            source.stage.release_copied(wait=True)


def _nothing_more(finished: bool) -> None:
    if not finished:
        raise RuntimeError("this epoch was ended by a newer iter(), by load_state_dict() or by close()")
