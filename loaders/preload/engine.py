"""The Preloader's engine: makes the batches of another engine ready on the device, `depth` of them ahead, in a thread.

EpochIterator -> PreloadEngine -> Engine: it stands between the iterator and the loader's own engine. Like that one, it
answers by the number of a task, and has no position: after an exception from a signal handler (Ctrl-C), wherever it
came, the iterator asks for the same number again. The thread asks the loader's engine for the numbers that follow.
`number` is a task's here; `batch_number` counts the batches of the epoch, and is a part of the key of random numbers.
Invariant: at most `depth` items are ready besides the one that is asked for, which stays until the next one is asked
for, and none once the epoch has ended. While the thread runs, nobody else uses the loader's engine, and nobody but the
consumer's thread runs the sampler. Both sides wait in SimpleQueues: an exception can leave no lock in them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from ..background import check_owner, is_of_signal, longest_wait, reraise_of_signal
from ..iterators import ENDED, EpochIterator
from ..nested import rows
from ..plans import Plan, SamplerError
from ..workers.messages import Reading
from .device_copy import DeviceCopier, Ready

# A thread may be inside the engine's get(). close() waits JOIN_SECONDS for it, then closes the loader, so that get()
# raises, and waits for another GIVE_UP_SECONDS before it leaves the thread behind.
JOIN_SECONDS = 0.1
GIVE_UP_SECONDS = 2.0


@dataclass(slots=True)
class Item:
    """What the loader's engine has answered for a task, with the batch on the device."""

    number: int  # the task's
    reading: Reading
    raised: BaseException | None = None  # an error that belongs to no batch
    ready: Ready | None = None  # when the batch is ready on the device
    is_finished: bool = False  # the consumer's part of the preparation is done


class PreloadEngine:
    """Prepares what the iterator's own engine reads.

    It must not refer to the preloader: its thread would keep an abandoned preloader alive for ever.
    """

    def __init__(self, iterator: EpochIterator, copier: DeviceCopier) -> None:
        self._engine = iterator.engine
        self._engine.locks_for = copier.locks_for
        if copier.takes_groups_on(self._engine.groups_on):
            self._engine.transform = copier.transform_group
        self._unblock = self._engine.close if iterator.owns_engine else None
        self._plan = iterator.plan
        self._consumer = iterator.consumer
        self._limit = iterator.limit
        self._pins = iterator.pins
        self._copier = copier
        self._depth = copier.depth
        start = self._consumer.position.task
        self._begun = Item(start - 1, Reading())  # the item that is being prepared, or was last
        self._items = deque([self._begun])  # as if the one before the first had been delivered
        self._wake: SimpleQueue[None] = SimpleQueue()  # has an entry at least for each new item
        self._room: SimpleQueue[None] = SimpleQueue()  # has an entry whenever there may be room for one
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self.is_ended = False
        self._draw(start + self._depth)

    @property
    def queued(self) -> int:
        """How many items are ready that the consumer has not received."""
        return len([item for item in list(self._items) if item.number >= self._consumer.position.task])

    def get(self, plan: Plan, number: int) -> Reading:
        """Returns the batch of task `number`, or its error; the same one again until the next one is asked for."""
        began = time.perf_counter()
        batch_number = self._consumer.position.batch
        copier = self._copier
        items = self._items
        if self._depth:
            check_owner(self._owner, "batches")
            self._draw(number + self._depth + 1)
        while items and items[0].number < number:
            copier.used(items[0].ready)
            items.popleft()
        self._room.put(None)
        while not items:
            if self.is_ended:
                raise RuntimeError(ENDED)
            if self._depth:
                self._wake.get()
            else:
                self._make(number, batch_number)
        item = items[0]
        if item.raised is not None:
            items.popleft()
            try:
                raise item.raised
            finally:  # else the error and this frame, which its traceback refers to, would keep each other alive
                del item
        if item.reading.has_batch:
            self._finish(item, batch_number)
        copier.stats.wait_seconds += time.perf_counter() - began
        if item.reading.has_batch:
            copier.stats.batches += 1
        if copier.timeline is not None:
            copier.timeline.delivered = copier.epoch, batch_number
        return item.reading

    def end_with_iterator(self) -> None:
        """Ends the epoch, as its iterator ends; not again, if a thread was left behind."""
        if not self.is_ended:
            self.end(self._unblock)

    def end(self, unblock: Callable[[], None] | None = None) -> bool:
        """Stops the thread and waits for it. If that takes long, `unblock` must make the engine's get() raise.

        Returns False if the thread did not end, and was left behind. May be called repeatedly.
        """
        self.is_ended = True
        self._room.put(None)
        self._wake.put(None)  # for a consumer that waits in another thread
        thread = self._thread
        if os.getpid() != self._owner or thread is threading.current_thread():
            return True  # in a forked child, or the garbage collector has run a finaliser in the thread itself
        if thread is not None:
            thread.join(None if unblock is None else longest_wait(JOIN_SECONDS))
            if unblock is not None and thread.is_alive():
                unblock()
                thread.join(longest_wait(GIVE_UP_SECONDS))
            if thread.is_alive():
                return False
        self._items.clear()
        self._begun.reading.batch = None
        self._copier.release()
        return True

    def fill(self) -> None:
        """Makes items until the epoch ends: what a thread runs, if depth is not 0."""
        self._thread = threading.current_thread()
        if self.is_ended:  # another epoch may run
            return
        number = self._consumer.position.task
        batch_number = self._consumer.position.batch
        try:
            with self._copier.accelerator.using(self._copier.stream):
                while not self.is_ended:
                    if len(self._items) > self._depth:
                        self._room.get()
                        continue
                    if batch_number == self._limit or not self._plan.has(number):
                        break
                    try:
                        reading = self._make(number, batch_number)
                    except BaseException as error:
                        self._items.append(Item(number, Reading(), error))
                    else:
                        number += 1
                        if not reading.is_empty:
                            batch_number += 1
                    self._wake.put(None)
        except SamplerError:
            pass  # the consumer's thread raises it in its place
        except BaseException as error:
            self._items.append(Item(number, Reading(), error))
            self.is_ended = True
            self._wake.put(None)
        finally:
            self._copier.release()

    def _draw(self, number: int) -> None:
        """Draws from the sampler, in the consumer's thread, all that is needed for the tasks before `number`.

        A sampler may draw from the global generators, which belong to the training loop's thread.
        """
        try:  # suppress() takes as long as all else here
            self._plan.has(number + self._engine.reads_ahead)
        except SamplerError:
            return  # it comes in its place

    def _make(self, number: int, batch_number: int) -> Reading:
        """Makes the item of task `number`, and appends it. An interrupted call may have read its batch."""
        copier = self._copier
        began = time.perf_counter()
        if self._begun.number != number:
            self._begun = Item(number, self._engine.get(self._plan, number))
        item = self._begun
        reading = item.reading
        copier.count_wait(began, batch_number)
        try:
            if reading.has_batch:
                if self._pins:
                    reading.batch = pin_memory(reading.batch)
                if reading.is_transformed:
                    item.ready = copier.note_ready()
                else:
                    reading.batch, item.ready = copier.copy(reading.batch, batch_number)
        except BaseException as error:
            if not self._depth and (not isinstance(error, Exception) or is_of_signal(error)):
                if self._engine.in_order:  # it reads the batch again: the transform may have changed it in place
                    self._begun = Item(number - 1, Reading())
                raise
            self._fail(reading, error)
        self._items.append(item)
        return reading

    def _finish(self, item: Item, batch_number: int) -> None:
        """Makes the item's batch ready for the consumer. Repeated after an exception, it draws the same numbers."""
        if item.is_finished:
            return
        reading = item.reading
        try:
            batch = self._copier.hand_over(reading.batch, item.ready, batch_number)
        except Exception as error:
            reraise_of_signal(error)
            self._fail(reading, error)
        else:
            reading.batch = batch
            item.is_finished = True  # no call in between, after which a signal handler could raise

    def _fail(self, reading: Reading, error: BaseException) -> None:
        """Puts the error in the place of the batch."""
        reading.error = error
        if isinstance(error, torch.OutOfMemoryError):
            reading.error = torch.OutOfMemoryError(
                f"out of memory on {self._copier.device} while preparing a batch of {rows(reading.batch)} samples "
                f"with depth={self._depth}: lower the batch size or the depth (loader.preload_depth)"
            )
            reading.error.__cause__ = error
        reading.batch = None


class PreloaderIterator:
    """What `iter(preloader)` returns. It keeps the preloader alive, which the engine must not."""

    def __init__(self, batches: EpochIterator, owner: Any) -> None:
        self._batches = batches
        self._owner = owner

    def __iter__(self) -> PreloaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._owner.loader)

    def __next__(self) -> Any:
        # Not next(): it is C, after which a signal handler may run, and the batch would be lost.
        return self._batches.__next__()
