"""An epoch of a Preloader: a thread makes `depth` items ahead, or the consumer's thread makes each when it asks.

Items have numbers. `received`, the last item that the consumer got, alone says where the consumer is: one assignment
moves it, and no call follows. So after an exception from a signal handler (Ctrl-C), wherever it came, the next call
asks for the same item again. That an item is (batch, error, state after it) is an idea of Grain.
Invariant: at most `depth` items are ready besides the one that is asked for, and none once the epoch has ended; while
the thread runs, nobody else uses the loader, but for its sampler, which only the consumer's thread runs. Both sides
wait in SimpleQueues: an exception can leave no lock in them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from ..background import check_owner, is_of_signal, reraise_of_signal
from ..iterators import ENDED, EpochIterator
from ..nested import rows
from ..randomness import Random
from .device_copy import DeviceCopier, Ready

# A thread may be inside the loader's next(). close() waits JOIN_SECONDS for it, then closes the loader, so that next()
# raises, and waits for another GIVE_UP_SECONDS before it leaves the thread behind.
JOIN_SECONDS = 0.1
GIVE_UP_SECONDS = 2.0


@dataclass
class Item:
    """A batch, or the error in its place, or the epoch's end; and where the loader is after it."""

    number: int
    batch: Any = None
    ready: Ready | None = None
    error: BaseException | None = None
    is_end: bool = False
    after: Any = None  # the loader's position after it, or the state of a loader that cannot be set back to a position
    is_last: bool = False  # no batch is left there


class PreloadedEpoch:
    """Prepares what the loader's iterator `batches` yields.

    key: the key of the transform's random numbers: seed, epoch, number of the first batch, rank.
    state_of: returns the state of a loader that cannot be set back to a position.
    It must not refer to the preloader: its thread would keep an abandoned preloader alive for ever.
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
        self._batches = batches
        self._copier = copier
        self._depth = depth
        self._state_of = state_of
        # Our own iterator can be set back to where the consumer is.
        self._source = batches if isinstance(batches, EpochIterator) and batches.in_order else None
        self.received = Item(-1)
        self._note_position(self.received)
        self._made = 0  # how many items the thread has made
        self._host: dict[int, Any] = {}  # the loader's batch, by its item's number, until that is made
        self._items: dict[int, Item] = {}
        self._wake: SimpleQueue[None] = SimpleQueue()  # has an entry at least for each new item
        self._room: SimpleQueue[int] = SimpleQueue()  # the numbers of the last items that the thread may make
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._is_ended = False
        self._give_room(depth - 1)

    def next(self) -> Any:
        """Returns the consumer's next batch, or raises the error in its place, or StopIteration."""
        began = time.perf_counter()
        received = self.received
        copier = self._copier
        if received.is_end:
            raise StopIteration
        copier.used(received.ready)
        item = self._get(received.number + 1)
        batch = self._finished(item, copier.hand_over(item.batch, item.ready))
        error = item.error
        copier.stats.wait_seconds += time.perf_counter() - began
        if error is None and not item.is_end:
            copier.stats.batches += 1
        if copier.timeline is not None:
            copier.timeline.delivered = self._batch_id(item)
        self.received = item  # no call from here on
        item.batch = None
        item.error = None
        if error is None:
            if item.is_end:
                raise StopIteration
            return batch
        try:
            raise error
        finally:  # else the error and this frame, which its traceback refers to, would keep each other alive
            del error

    def _finished(self, item: Item, batch: Any) -> Any:
        """Returns what the consumer gets. An interrupted call is repeated, with the same batch and random numbers."""
        if item.error is None and not item.is_end:
            try:
                return self._copier.finished(batch, Random(self._seed, *self._batch_id(item), self._rank))
            except Exception as error:
                reraise_of_signal(error)
                self._keep(item, error, batch)
        return None

    @property
    def queued(self) -> int:
        """How many items are ready that the consumer has not received."""
        return max(0, self._made - self.received.number - 1)

    @property
    def is_running(self) -> bool:
        return not (self._is_ended or self.received.is_end)

    def has_ended(self) -> bool:
        """Returns whether no batch is left; if so, waits until the thread has seen it too."""
        if self.received.is_last and self.is_running:
            self._get(self.received.number + 1)
        return self.received.is_last or self.received.is_end

    @property
    def has_thread(self) -> bool:
        """Whether a thread uses the loader."""
        return self._thread is not None and self._thread.is_alive()

    def leave(self) -> None:
        """Stops the thread, because another consumer of the loader begins."""
        if not self._is_ended:
            self.end()

    def end(self, unblock: Callable[[], None] | None = None) -> bool:
        """Stops the thread and waits for it. If that takes long, `unblock` must make the loader's next() raise.

        Returns False if the thread did not end, and was left behind. May be called repeatedly.
        """
        self._is_ended = True
        self._room.put(0)
        self._wake.put(None)  # for a consumer that waits in another thread
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
        self._host.clear()
        self._copier.release()
        return True

    def _get(self, number: int) -> Item:
        """Waits for an item, and returns it: the same one again until the consumer asks for the next one."""
        self._items.pop(number - 1, None)
        if self._depth:
            check_owner(self._owner, "batches")
            self._give_room(number + self._depth)
        while (item := self._items.get(number)) is None and not self._is_ended:
            if self._depth:
                self._wake.get()
            else:
                self._go_back()
                self._make(number)
        if self._is_ended or item is None:
            raise RuntimeError(ENDED)
        return item

    def _give_room(self, last: int) -> None:
        """Lets the thread make items up to number `last`. It runs no sampler: the consumer's thread does, here."""
        if isinstance(self._batches, EpochIterator) and not self._is_ended:
            self._batches.draw(self._first + last)
        self._room.put(last)

    def fill(self) -> None:
        """Makes items until the epoch ends: what a thread runs, if depth is not 0."""
        self._thread = threading.current_thread()
        is_end = False
        last = -1
        try:
            with self._copier.accelerator.using(self._copier.stream):
                while not (self._is_ended or is_end):
                    if self._made > last:
                        last = self._room.get()
                        continue
                    is_end = self._make(self._made).is_end
                    self._made += 1
                    self._wake.put(None)
        except BaseException as error:
            self._items[self._made] = Item(self._made, error=error, is_end=True)
            self._wake.put(None)
        finally:
            if self._made:  # else the epoch may have ended before the thread began, and another epoch runs
                self._copier.release()

    def _make(self, number: int) -> Item:
        """Makes an item of the loader's next batch, or of the one that an interrupted call has fetched for it."""
        item = Item(number)
        copier = self._copier
        began = time.perf_counter()
        try:
            if number not in self._host:
                # Not next(): no signal handler runs before the batch is kept.
                if isinstance(self._batches, EpochIterator):
                    self._host[number] = self._batches.lend(copier.borrower)
                else:
                    self._host[number] = self._batches.__next__()
        except StopIteration:
            item.is_end = True
        except BaseException as error:
            self._keep(item, error, None)
        self._note_position(item)
        batch_id = self._batch_id(item)
        copier.count_wait(began, batch_id)
        try:
            if number in self._host:
                random = Random(self._seed, *batch_id, self._rank)
                item.batch, item.ready = copier.prepare(self._host[number], random, batch_id)
        except BaseException as error:
            self._keep(item, error, self._host)
        self._items[number] = item
        self._host.clear()
        return item

    def _keep(self, item: Item, error: BaseException, batch: Any) -> None:
        """Makes it the item's error. Raises an error that belongs to no item, such as a signal handler's."""
        if not self._depth and (not isinstance(error, Exception) or is_of_signal(error)):
            raise error
        item.error = error
        if isinstance(error, StopIteration):
            item.error = RuntimeError("preparing a batch raised StopIteration, which would end the epoch")
        elif isinstance(error, torch.OutOfMemoryError):
            item.error = torch.OutOfMemoryError(
                f"out of memory on {self._copier.device} while preparing a batch of {rows(batch)} samples with "
                f"depth={self._depth}: lower the batch size or the depth (loader.preload_depth)"
            )
        if item.error is not error:
            item.error.__cause__ = error

    def _batch_id(self, item: Item) -> tuple[int, int]:
        """Returns the epoch of the item's batch, and its number there."""
        return self.epoch, self._first + item.number

    def _note_position(self, item: Item) -> None:
        """Notes where the loader is after the item; an error that belongs to no batch has not moved it."""
        if self._source is None:
            item.after = self._state_of()
        else:
            item.after = self._source.position
            item.is_last = self._source.at_end

    def _go_back(self) -> None:
        """Sets the loader's iterator to where the consumer is; mostly it is there."""
        if self._source is not None and self._source.position.task != self.received.after.task:
            self._source.go_back(self.received.after)
            self._host.clear()


class PreloaderIterator:
    """What `iter(preloader)` returns. It keeps the preloader alive, which the epoch must not."""

    def __init__(self, epoch: PreloadedEpoch, owner: Any) -> None:
        self._epoch = epoch
        self._owner = owner

    def __iter__(self) -> PreloaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._owner.loader)

    def __next__(self) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return torch._dynamo.disable(self.__next__)()
        return self._epoch.next()
