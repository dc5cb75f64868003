"""Threads that load in the background: one core each, and out of the way before the interpreter ends."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

EXIT_SECONDS = 5.0  # how long the interpreter's end waits for all threads together

_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def start_thread(name: str, function: Callable[..., None], *args: Any) -> threading.Thread:
    """Starts function(*args) in a daemon thread: one that does not come back does not hold up the interpreter's end.

    It shares the cores with the training step and with its likes, so torch uses one core in it. torch would also take
    that number over for threads that have none yet, perhaps the main one, so it is set back.
    """
    started = threading.Event()

    def run() -> None:
        torch.set_num_threads(1)
        started.set()
        function(*args)

    num_threads = torch.get_num_threads()
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    started.wait()
    torch.set_num_threads(num_threads)
    return thread


def stop_at_exit(owner: Any) -> None:
    """Has `owner.stop(deadline)` (time.monotonic) called before the interpreter takes away what threads stand on."""
    _owners.add(owner)


@atexit.register
def _stop_all() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for owner in list(_owners):
        owner.stop(deadline)
