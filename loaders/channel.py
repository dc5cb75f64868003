"""A bounded queue between one producing thread and one consumer, either of which may be told to stop.

Invariant: once closed, a channel holds no item, every waiting call returns, and later calls do not wait.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class Closed(Exception):
    """The channel was closed: there is nothing more to put or to get."""


class Channel:
    """Like queue.Queue(maxsize=depth), with a `close` that wakes both sides at once instead of a time-out."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[Any] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: Any) -> None:
        """Waits for room. Raises Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if self._closed:
                raise Closed
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Any:
        """Waits for an item. Raises Closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            if self._closed:
                raise Closed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)
