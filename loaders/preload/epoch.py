"""An epoch of a preloader: a thread makes its items ahead, or the consumer's thread makes each when it asks for it.

An item is a batch on the device, or an error, with the loader's state after it: an idea from Grain.
Invariant: at most `depth` items are queued, and none once the epoch is closed; closing wakes whoever waits. The queues
are SimpleQueues, because an exception from a signal handler can leave a Condition locked, but not those.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ..background import check_owner, start_thread
from ..base import ENDED, Delivery, EpochIterator, Position
from ..nested import rows
from ..randomness import Random
from ..samplers import length_of
from .device_copy import DeviceCopier

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
    is_delivered: bool = False


class PreloadedEpoch:
    """The source of an epoch's batches, from `position` on; `depth` of them are made ahead in a thread.

    batches: the loader's iterator. state_of: returns the loader's state; `state` is the one at the position.
    seed, rank: the loader's; with epoch and number they are the key of the transform's random numbers.
    It must not refer to the preloader: else its thread would keep an abandoned preloader alive for ever.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        copier: DeviceCopier,
        depth: int,
        position: Position,
        state_of: Callable[[], dict[str, Any] | None],
        state: dict[str, Any] | None,
        seed: int,
        rank: int,
    ) -> None:
        self.position = position
        length = length_of(batches)
        self.length = None if length == sys.maxsize else length  # in batches, if the loader's iterator knows it
        self._batches, self._copier, self._depth, self._state_of = batches, copier, depth, state_of
        self._key, self._rank = (seed, position.epoch), rank
        self._number = position.batch  # of the next batch
        self._fetched: list[Any] = []  # a batch that is not part of an item yet
        self._items: SimpleQueue[Item | None] = SimpleQueue()  # None: the epoch is closed
        self._room: SimpleQueue[None] = SimpleQueue()  # has an entry for each item that may still be queued
        self._got: deque[Item | None] = deque()  # the consumer's item, until it is delivered
        self._states = {position.batch: state}  # by the number of the next batch
        self._newest: Delivery | None = None
        self._ready: Any = None  # the event of its completion
        self._owner, self._is_closed = os.getpid(), False
        for _ in range(depth):
            self._room.put(None)
        if isinstance(batches, EpochIterator):
            batches.reader = weakref.ref(self)
        self._thread = start_thread("preloader", self._fill) if depth else None

    @property
    def queued(self) -> int:
        """How many items are ready."""
        return 0 if self._is_closed else self._items.qsize()

    @property
    def state(self) -> dict[str, Any] | None:
        """The loader's state after the last batch that the consumer received."""
        return self._states.get(self.position.batch)

    def is_over(self) -> bool:
        """Returns whether no batch is left. Once the loader's state names another epoch, it waits to see that."""
        epoch = self.position.epoch
        may_be = self.length == 0 or (self.state or {}).get("epoch", epoch) != epoch
        return may_be and (self._is_closed or self._get().is_end)

    def next(self) -> Delivery | None:
        """Waits for the next batch, and returns the same one again until it is taken; None at the end of the epoch."""
        began = time.perf_counter()
        if self._newest is not None:
            if not self._newest.is_taken:
                if self._newest.error is None:  # perhaps another thread takes it, on another stream
                    self._copier.hand_over(self._newest.batch, self._ready)
                return self._newest
            self._copier.used()
            self._newest = None
        item, copier = self._get(), self._copier
        copier.figures["wait_seconds"] += time.perf_counter() - began
        if item.is_end:
            return None
        self._states = {item.number: self.state, item.after: item.state}
        if item.error is not None:
            delivery = Delivery(item.number if item.after > item.number else None, error=item.error)
        else:
            delivery, self._ready = Delivery(item.number, copier.hand_over(item.batch, item.ready)), item.ready
            if copier.timeline is not None:
                copier.timeline.delivered = self.position.epoch, item.number
            copier.figures["batches"] += 1
            copier.figures["queued"] += self.queued
        self._newest = delivery
        # The error's traceback refers to the item: if the item also held the error, both would stay alive.
        item.batch = item.error = None
        item.is_delivered = True
        self._make_room()
        return delivery

    def close(self) -> None:
        """Ends the epoch. May be called repeatedly."""
        self.end()

    def end(self, unblock: Callable[[], None] | None = None, seconds: float = GIVE_UP_SECONDS) -> bool:
        """Stops the thread and waits for it. If that takes long, `unblock` must make the loader's next() raise.

        Returns False if the thread did not end within further `seconds`, and was left behind.
        """
        self._is_closed = True
        self._drop_all()
        if (thread := self._thread) is None:
            self._copier.release_copied(wait=True)
        if thread is None or thread is threading.current_thread():
            return True  # the garbage collector may have run a finaliser in the thread itself
        thread.join(None if unblock is None else JOIN_SECONDS)
        if unblock is not None and thread.is_alive():
            unblock()
            thread.join(seconds)
        return not thread.is_alive()

    def _get(self) -> Item:
        """Waits for the next item, and returns it: the same one again until it is delivered."""
        if self._thread is not None:
            check_owner(self._owner, "batches")
        item = next(iter(self._got), None)
        if item is not None and item.is_delivered:  # an exception came before the call of _make_room
            self._make_room()
        if not self._is_closed and not self._got:
            fetch: Callable[[], Item | None] = self._make if self._thread is None else self._items.get
            self._got.extend(starmap(fetch, ((),)))  # one call, so that an exception cannot lose the item
        item = next(iter(self._got), None)
        if item is None or self._is_closed:
            raise RuntimeError(ENDED)
        return item

    def _make_room(self) -> None:
        """Drops the delivered item, so that the thread may queue another one."""
        if self._got:
            self._room.put(None)
            self._got.clear()

    def _drop_all(self) -> None:
        """Drops all items of a closed epoch, and wakes both sides."""
        self._got.clear()
        with suppress(Empty):
            while True:
                self._items.get_nowait()
        self._items.put(None)
        self._room.put(None)

    def _fill(self) -> None:
        """Runs in the thread: queues items until the epoch ends or is closed."""
        try:
            with self._copier.on_stream():
                while self._put(self._make()):
                    pass
        except BaseException as error:
            self._put(Item(self._number, self._number + 1, error=error))
            self._put(Item(self._number + 1, is_end=True))
        finally:
            self._copier.release_copied(wait=True)

    def _put(self, item: Item) -> bool:
        """Waits until there is room for the item, and returns whether another one is wanted."""
        if not self._is_closed:
            self._room.get()
            self._items.put(item)
        if self._is_closed:  # perhaps just now
            self._drop_all()
        return not (item.is_end or self._is_closed)

    def _make(self) -> Item:
        """Makes the epoch's next item. If an exception from a signal handler interrupts it, the next call goes on."""
        item, began = Item(self._number, self._number + 1), time.perf_counter()
        try:
            # One call fetches and keeps it, so that no exception can lose it.
            if not self._fetched:
                self._fetched.extend(map(next, (self._batches,)))  # not islice, which would call iter() again
            item.is_end = not self._fetched
        except Exception as error:
            item.error = error
        if item.is_end:
            return item
        # The loader's own count, where it has one: an error that belongs to no batch, such as a timeout, is not in it.
        if (position := getattr(self._batches, "position", None)) is not None:
            item.after = position.batch
            item.number = max(self._number, item.after - 1)
        batch_id = self.position.epoch, item.number
        self._copier.count_wait(began, batch_id)
        try:
            item.state = self._state_of()
            if item.error is None:
                random = Random(*self._key, item.number, self._rank)
                item.batch, item.ready = self._copier.prepare(self._fetched[0], random, batch_id)
        except torch.OutOfMemoryError as error:
            item.error = torch.OutOfMemoryError(
                f"out of memory on {self._copier.device} while preparing a batch of {rows(self._fetched[0])} samples "
                f"with depth={self._depth}: lower the batch size or the depth (loader.preload_depth)"
            )
            item.error.__cause__ = error
        except Exception as error:
            item.error = item.error or error
        self._fetched, self._number = [], item.after  # no call from here on
        return item
