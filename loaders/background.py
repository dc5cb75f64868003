"""Starts background threads that use one core each, and stops threads and workers when the interpreter exits.

A forked child of the program leaves its parent's threads and workers alone.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util  # its exit function joins all workers; ours is registered later, and so runs first
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
import torch.multiprocessing

EXIT_SECONDS = 5.0  # how long the interpreter's exit waits for threads and workers, all together


class Stoppable(Protocol):
    """Something that runs in the background and can be stopped."""

    def stop(self, deadline: float) -> None:
        """Stops it, and waits until it has stopped, or until `deadline` (time.monotonic)."""


_running: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def start_thread(name: str, function: Callable[..., None], *args: Any) -> threading.Thread:
    """Starts function(*args) in a daemon thread, which cannot block the interpreter's exit.

    Torch uses one core in the thread, as it shares the cores with the training step. torch.set_num_threads also
    changes the number for threads that have not set theirs, such as the main thread, so it is set back afterwards.
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


def stop_at_exit(item: Stoppable) -> None:
    """Calls `item.stop(deadline)` before the interpreter exits, if the item still exists then."""
    _running.add(item)


def protect_from_children(worker: BaseProcess) -> None:
    """Keeps forked children of this process from terminating the worker when they exit."""
    _workers.add(worker)


def forget(worker: BaseProcess) -> None:
    """Drops multiprocessing's reference to a worker that has exited.

    multiprocessing would keep it for ever if the program itself reaped the worker, in a SIGCHLD handler for example.
    """
    multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]  # no public way


def check_owner(owner: int, what: str) -> None:
    """Raises RuntimeError if this process is a forked child of process `owner`, which has the loader's workers."""
    if os.getpid() != owner:
        raise RuntimeError(
            f"this loader's {what} belong to another process ({owner}), of which this one ({os.getpid()}) is a forked "
            "child: make a new loader in the child"
        )


def default_context() -> Any:
    """Returns the multiprocessing context for workers: the start method that the program set, else fork on Linux.

    Fork starts fastest and copies no dataset. A method that is not one of Python's own is ignored: joblib sets "loky"
    in its processes, for its own use.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    if method not in ("fork", "spawn", "forkserver"):
        method = "fork" if sys.platform == "linux" else "spawn"
    return torch.multiprocessing.get_context(method)


@atexit.register
def _stop_all() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for item in list(_running):
        item.stop(deadline)


def _forget_all() -> None:
    """Runs in a forked child, which does not have its parent's threads and must not stop its parent's workers.

    multiprocessing would terminate them: at exit it does so with all processes in its list, by process id.
    """
    _running.clear()
    multiprocessing.process._children.difference_update(_workers)  # type: ignore[attr-defined]  # no public way


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
