"""A bounded queue between one producing thread and one consumer, which can be closed from either side.

Invariant: a closed queue holds no item. Closing it wakes every waiting call, and later calls do not wait. It is made
of queue.SimpleQueues, because an exception from a signal handler can leave a Condition locked, but not those.
"""

from __future__ import annotations

from collections import deque
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The queue was closed: nothing can be put or got."""


class ClosableQueue(Generic[T]):
    """Like queue.Queue(maxsize=depth), with a `close` that wakes both sides at once."""

    def __init__(self, depth: int) -> None:
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()  # has an entry for each item that may still be put
        self._got: deque[Any] = deque()  # the item that `get` returns
        self._closed = False
        for _ in range(depth):
            self._room.put(None)

    def put(self, item: T) -> None:
        """Waits until there is room. Raises Closed."""
        if not self._closed:
            self._room.get()
            self._items.put(item)
        if self._closed:  # perhaps just now
            self.close()
            raise Closed

    def get(self) -> T:
        """Waits until there is an item, and returns it: the same one again until `done` is called. Raises Closed."""
        if not self._closed and not self._got:
            self._got.extend(map(self._items.get, (True,)))  # one call, so that an exception cannot lose the item
        item: T | type[Closed] = Closed if self._closed else self._got[0]
        if isinstance(item, type):
            self._items.put(Closed)  # wakes the next waiting call
            raise Closed
        return item

    def done(self) -> None:
        """Drops the item that `get` returned, which makes room for another one."""
        if self._got:
            self._room.put(None)
            self._got.clear()

    def close(self) -> None:
        """Drops all items, and makes every put and get raise Closed. May be called repeatedly."""
        self._closed = True
        self._got.clear()
        try:
            while True:
                self._items.get_nowait()
        except Empty:
            pass
        self._items.put(Closed)
        self._room.put(None)

    def __len__(self) -> int:
        return 0 if self._closed else self._items.qsize()
