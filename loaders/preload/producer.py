"""Makes the items of an epoch: each is a batch on the device, or an error, with the loader's state after it.

A thread makes them ahead and puts them into a queue, or the consumer's thread makes each one when it asks for it.
Keeping the state and the error with the batch is an idea from Grain.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import torch

from ..background import check_owner, start_thread
from ..base import ENDED
from ..nested import rows
from ..randomness import Random
from .device_copy import DeviceCopier
from .queue import ClosableQueue, Closed

log = logging.getLogger(__name__)

# A thread may be inside the loader's next(). close() waits JOIN_SECONDS for it, then closes the loader, so that next()
# raises, and waits for another GIVE_UP_SECONDS before it leaves the thread behind.
JOIN_SECONDS, GIVE_UP_SECONDS = 0.1, 2.0


@dataclass
class Item:
    """A batch or an error, with its number in the epoch and the loader's state after it; or the epoch's end."""

    number: int
    after: int = 0  # the number of the next item
    batch: Any = None
    ready: Any = None  # an event of the device: completes when the batch is ready on the device
    state: dict[str, Any] | None = None
    error: BaseException | None = None
    is_end: bool = False


@dataclass
class ItemMaker:
    """Makes the epoch's next item at each call.

    It must not refer to the preloader: else the running thread would keep an abandoned preloader alive for ever.
    """

    batches: Iterator[Any]
    copier: DeviceCopier
    depth: int
    state: Callable[[], dict[str, Any] | None]
    key: tuple[int, int]  # seed and epoch: with the number and the rank, the key of the transform's random numbers
    rank: int
    number: int  # of the next batch
    fetched: list[Any] = field(default_factory=list)  # a batch that is not part of an item yet

    def __call__(self) -> Item:
        item, began = Item(self.number, self.number + 1), time.perf_counter()
        try:
            # One call fetches and keeps it, so that an exception from a signal handler cannot lose it.
            if not self.fetched:
                self.fetched.extend(map(next, (self.batches,)))  # not islice, which would call iter() again
            item.is_end = not self.fetched
        except Exception as error:
            item.error = error
        if item.is_end:
            return item
        # The loader's own count, where it has one: an error that belongs to no batch, such as a timeout, is not in it.
        if (position := getattr(self.batches, "position", None)) is not None:
            item.after = position.batch
            item.number = max(self.number, item.after - 1)
        batch_id = self.key[1], item.number
        self.copier.count_wait(began, batch_id)
        try:
            item.state = self.state()
            if item.error is None:
                random = Random(*self.key, item.number, self.rank)
                item.batch, item.ready = self.copier.prepare(self.fetched[0], random, batch_id)
        except StopIteration as error:  # raised by next(), it would silently end the epoch
            item.error = RuntimeError("the transform raised StopIteration")
            item.error.__cause__ = error
        except torch.OutOfMemoryError as error:
            item.error = torch.OutOfMemoryError(
                f"out of memory on {self.copier.device} while preparing a batch of {rows(self.fetched[0])} samples "
                f"with depth={self.depth}: lower the batch size or the depth (loader.preload_depth)"
            )
            item.error.__cause__ = error
        except Exception as error:
            item.error = item.error or error
        self.fetched, self.number = [], item.after  # no call from here on
        return item


class InlineProducer:
    """Makes each item in the call that asks for it."""

    queued = 0

    def __init__(self, make: ItemMaker) -> None:
        self._make: ItemMaker | None = make
        self._copier = make.copier
        self._made: deque[Item] = deque()

    def get(self) -> Item:
        """Returns the next item: the same one again until `done` is called."""
        if self._make is None:
            raise RuntimeError(ENDED)
        if not self._made:
            self._made.extend(starmap(self._make, ((),)))  # one call, so that an exception cannot lose the item
        return self._made[0]

    def done(self) -> None:
        """Drops the item that `get` returned."""
        self._made.clear()

    def close(self, unblock: Callable[[], None] | None = None) -> None:
        self._make = None
        self._copier.release_copied(wait=True)

    def stop(self, deadline: float, unblock: Callable[[], None]) -> None:
        """Does nothing: there is no thread to stop."""


class ThreadProducer:
    """Makes items ahead in a thread, `depth` of them at most."""

    def __init__(self, make: ItemMaker) -> None:
        self._owner = os.getpid()
        self._queue: ClosableQueue[Item] = ClosableQueue(make.depth)
        self._thread = start_thread("preloader", _fill, self._queue, make)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def get(self) -> Item:
        """Waits for the next item, and returns it: the same one again until `done` is called."""
        check_owner(self._owner, "batches")
        try:
            return self._queue.get()
        except Closed:
            raise RuntimeError(ENDED) from None

    def done(self) -> None:
        """Drops the item that `get` returned, which makes room for another one."""
        self._queue.done()

    def close(self, unblock: Callable[[], None] | None = None) -> None:
        """Stops the thread and waits for it. If that takes long, `unblock` must make the loader's next() raise."""
        self._queue.close()
        if self._thread is threading.current_thread():
            return  # the garbage collector ran a finaliser in the thread itself
        if unblock is None:
            self._thread.join()
            return
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            unblock()
            self._thread.join(GIVE_UP_SECONDS)
        if self._thread.is_alive():
            log.warning("the preloader's thread is stuck in the loader's next() and was left behind")

    def stop(self, deadline: float, unblock: Callable[[], None]) -> None:
        """Stops the thread at the interpreter's exit, and waits for it until `deadline` (time.monotonic)."""
        self._queue.close()
        self._thread.join(0.1)  # enough for a thread that only waits for room in the queue
        if self._thread.is_alive():
            with suppress(Exception):  # the program is over: nobody could handle it
                unblock()
        self._thread.join(max(0, deadline - time.monotonic()))


def _fill(queue: ClosableQueue[Item], make: ItemMaker) -> None:
    """Runs in the thread: puts items into the queue until the epoch ends or the queue is closed."""
    try:
        with make.copier.on_stream():
            is_end = False
            while not is_end:
                item = make()
                is_end = item.is_end
                queue.put(item)
                del item  # the consumer owns it now: keep no reference while the next one is made
    except Closed:
        pass
    except BaseException as error:
        with suppress(Closed):
            queue.put(Item(make.number, make.number + 1, error=error))
            queue.put(Item(make.number + 1, is_end=True))
    finally:
        make.copier.release_copied(wait=True)
