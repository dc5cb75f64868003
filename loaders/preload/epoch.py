"""An epoch of a Preloader: a thread makes `depth` items ahead, or the consumer's thread makes each when it asks.

Items have numbers, and `received`, the last one that the consumer got, is all that says where the consumer is: one
assignment moves it, and no call follows. So after whatever an exception from a signal handler (Ctrl-C) interrupts, the
next call asks for the same item again. That an item is (batch, error, state after it) is an idea of Grain.
Invariant: at most `depth` items are ready besides the one that is asked for, and none once the epoch has ended; while
the thread runs, nobody else uses the loader. Both sides wait in SimpleQueues: an exception can leave no lock in them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from ..background import check_owner, is_of_signal, start_thread
from ..iterators import ENDED, EpochIterator, Position
from ..nested import rows
from ..randomness import Random
from .device_copy import DeviceCopier, Ready

# A thread may be inside the loader's next(). close() waits JOIN_SECONDS for it, then closes the loader, so that next()
# raises, and waits for another GIVE_UP_SECONDS before it leaves the thread behind.
JOIN_SECONDS, GIVE_UP_SECONDS = 0.1, 2.0


@dataclass
class Item:
    """A batch, or the error in its place, or the epoch's end; and where the loader is after it."""

    number: int
    of_epoch: int = 0  # the batch's number in its epoch
    batch: Any = None
    ready: Ready | None = None
    error: BaseException | None = None
    is_end: bool = False
    position: Position | None = None  # after it, if `batches` is an EpochIterator that can go back
    is_last: bool = False  # no batch is left there
    state: Any = None  # the state after it of a loader that is not ours


class PreloadedEpoch:
    """Prepares what the loader's iterator `batches` yields.

    key: of the transform's random numbers: seed, epoch, the number of the epoch's first batch, and rank.
    state_of: returns the state of a loader that is not ours.
    It must not refer to the preloader: else its thread would keep an abandoned preloader alive for ever.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        copier: DeviceCopier,
        depth: int,
        key: tuple[int, int, int, int],
        state_of: Callable[[], Any],
    ) -> None:
        self._seed, self.epoch, self._first, self._rank = key
        self._copier, self._depth, self._state_of = copier, depth, state_of
        self._batches = batches
        # It can be set back to where the consumer is.
        self._source = batches if isinstance(batches, EpochIterator) and batches.in_order else None
        self.received = self._placed(Item(-1))
        self._asked = -1  # the number of the item that the consumer has asked for
        self._made = 0  # how many items the thread has made
        self._host: list[Any] = []  # the loader's batch, until its item is made
        self._items: dict[int, Item] = {}
        self._wake: SimpleQueue[None] = SimpleQueue()  # has an entry at least for each new item
        self._room: SimpleQueue[None] = SimpleQueue()  # has an entry at least for each item that was asked for
        self._thread: threading.Thread | None = None
        self._owner, self._is_ended = os.getpid(), False

    def start(self) -> None:
        """Starts the thread, if there is to be one."""
        if self._depth:
            start_thread("preloader", self._fill)

    def next(self) -> Any:
        """Returns the consumer's next batch, or raises the error in its place, or StopIteration."""
        received, copier, began = self.received, self._copier, time.perf_counter()
        if received.is_end:
            raise StopIteration
        copier.used(received.ready)
        item = self._get(received.number + 1)
        batch, error = copier.hand_over(item.batch, item.ready), item.error
        copier.figures["wait_seconds"] += time.perf_counter() - began
        copier.figures["batches"] += error is None and not item.is_end
        if copier.timeline is not None:
            copier.timeline.delivered = self.epoch, item.of_epoch
        self.received = item  # no call from here on
        item.batch = item.error = None
        if item.is_end:
            raise StopIteration
        if error is None:
            return batch
        try:
            raise error
        finally:  # else the error and this frame, which its traceback refers to, would keep each other alive
            del error

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # if it has one

    @property
    def queued(self) -> int:
        """How many items are ready that were not asked for."""
        return max(0, self._made - self._asked - 1)

    @property
    def is_running(self) -> bool:
        return not (self._is_ended or self.received.is_end)

    def is_over(self) -> bool:
        """Returns whether no batch is left; if so, waits until the thread has seen it too."""
        received = self.received
        if received.is_last and not (received.is_end or self._is_ended):
            self._get(received.number + 1)
        return received.is_last or received.is_end

    def end(self, unblock: Callable[[], None] | None = None) -> bool:
        """Stops the thread and waits for it. If that takes long, `unblock` must make the loader's next() raise.

        Returns False if the thread did not end, and was left behind. May be called repeatedly.
        """
        self._is_ended = True
        self._room.put(None)
        self._wake.put(None)  # a consumer that waits in another thread
        thread = self._thread
        if os.getpid() != self._owner or thread is threading.current_thread():
            return True  # in a forked child, or the garbage collector has run a finaliser in the thread itself
        if thread is not None:
            thread.join(None if unblock is None else JOIN_SECONDS)
            if unblock is not None and thread.is_alive():
                unblock()
                thread.join(GIVE_UP_SECONDS)
            if thread.is_alive():
                return False
        self._go_back()
        self._items.clear()
        self._host = []
        self._copier.release()
        return True

    def _get(self, number: int) -> Item:
        """Waits for an item, and returns it: the same one again until the consumer asks for the next one."""
        if self._depth:
            check_owner(self._owner, "batches")
        self._items.pop(number - 1, None)
        self._asked = number
        self._room.put(None)
        while self._is_ended or number not in self._items:
            if self._is_ended:
                raise RuntimeError(ENDED)
            if self._depth:
                self._wake.get()
            else:
                self._go_back()
                self._items[number] = self._make(number)
                self._host = []
        return self._items[number]

    def _fill(self) -> None:
        """Runs in the thread: makes items until the epoch ends."""
        self._thread = threading.current_thread()
        is_end = False
        try:
            with self._copier.on_stream():
                while not (self._is_ended or is_end):
                    if self._made > self._asked + self._depth:
                        self._room.get()
                    else:
                        is_end = self._add(self._make(self._made))
        except BaseException as error:
            self._add(Item(self._made, error=error))
            self._add(Item(self._made, is_end=True))
        finally:
            self._copier.release()

    def _add(self, item: Item) -> bool:
        self._host = []
        self._items[item.number] = item
        self._made += 1
        self._wake.put(None)
        return item.is_end

    def _make(self, number: int) -> Item:
        """Returns the item after the loader's next batch, or after the one that an interrupted call has fetched."""
        item, began = Item(number, self._first + number), time.perf_counter()
        try:
            if not self._host:
                self._host = [self._batches.__next__()]  # not next(): no signal handler runs before it is kept
        except StopIteration:
            item.is_end = True
        except BaseException as error:
            self._keep(item, error)
        batch_id = self.epoch, self._placed(item).of_epoch
        self._copier.count_wait(began, batch_id)
        try:
            if self._host:
                random = Random(self._seed, *batch_id, self._rank)
                item.batch, item.ready = self._copier.prepare(self._host[0], random, batch_id)
        except BaseException as error:
            self._keep(item, error)
        return item

    def _keep(self, item: Item, error: BaseException) -> None:
        """Makes it the item's error, or raises it if it belongs to no item: a signal handler's comes out as it is."""
        if not self._depth and (not isinstance(error, Exception) or is_of_signal(error)):
            raise error
        if isinstance(error, StopIteration):
            item.error = RuntimeError("preparing a batch raised StopIteration, which would end the epoch")
        elif isinstance(error, torch.OutOfMemoryError):
            item.error = torch.OutOfMemoryError(
                f"out of memory on {self._copier.device} while preparing a batch of {rows(self._host)} samples with "
                f"depth={self._depth}: lower the batch size or the depth (loader.preload_depth)"
            )
        else:
            item.error = item.error or error
            return
        item.error.__cause__ = error

    def _placed(self, item: Item) -> Item:
        """Notes where the loader is after the item; an error that belongs to no batch has not moved it."""
        if self._source is None:
            item.state = self._state_of()
        else:
            item.position, item.is_last = copy(self._source.position), self._source.is_over
            item.of_epoch = item.position.batch - 1
        return item

    def _go_back(self) -> None:
        """Sets the loader's iterator to where the consumer is; mostly it is there."""
        source, here = self._source, self.received.position
        if source is not None and here is not None and source.position.turn != here.turn:
            source.go_back(here)
            self._host = []


class PreloaderIterator:
    """What `iter(preloader)` returns. It keeps the preloader alive, which the epoch must not."""

    def __init__(self, epoch: PreloadedEpoch, owner: Any) -> None:
        self._epoch, self._owner = epoch, owner

    def __iter__(self) -> PreloaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._epoch)

    def __next__(self) -> Any:
        return self._epoch.next()
