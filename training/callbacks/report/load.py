"""Load: how many of the cores that this process may use were kept from it by other programs."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

import psutil

from loaders.machine import available_cores

LEAST_SECONDS = 0.2


class Load:
    """Measures from its construction on. Workers and other descendants of this process are not other programs."""

    def __init__(self) -> None:
        self._start = _Times.now()

    def of_others(self) -> float:
        """The share (0 to 1) of this process's cores that it could not have used, as other programs did.

        It is 0 within LEAST_SECONDS: the system counts in hundredths of a second.
        """
        now, start = _Times.now(), self._start
        seconds, free = now.clock - start.clock, (now.idle - start.idle) + (now.own - start.own)
        return 0.0 if seconds < LEAST_SECONDS else max(0.0, 1 - free / (available_cores() * seconds))


class _Times(NamedTuple):
    """Seconds: the clock, and of all cores together those that were idle, and those that this process used."""

    clock: float
    idle: float
    own: float

    @classmethod
    def now(cls) -> _Times:
        this, own = psutil.Process(), 0.0
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.Error):  # the process may have exited
                times = process.cpu_times()
                own += times.user + times.system + times.children_user + times.children_system
        every = psutil.cpu_times(percpu=True)
        used = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
        idle = sum(every[core].idle + getattr(every[core], "iowait", 0.0) for core in used if core < len(every))
        return cls(time.monotonic(), idle, own)
