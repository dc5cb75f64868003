"""How busy other programs kept this process's cores: the figures of a run on a shared machine vary with them."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

from loaders import available_cores
from training.verdict import OTHERS

LEAST_SECONDS = 0.2  # the system counts in hundredths of a second: less tells nothing


class Load:
    """Measures from its construction on. Workers and other descendants of this process are not other programs."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._free = free_seconds()

    def of_others(self) -> float:
        """The share (0 to 1) of this process's cores that other programs used."""
        seconds = time.monotonic() - self._start
        if seconds < LEAST_SECONDS:
            return 0.0
        free = free_seconds() - self._free
        return min(1.0, max(0.0, 1 - free / (available_cores() * seconds)))


def about_others(share: float) -> str:
    """A sentence about the share of the cores that other programs used; empty if that is little."""
    if share <= OTHERS:
        return ""
    return f"Other programs used {share:.0%} of the cores: an idle machine gives other figures."


def free_seconds() -> float:
    """Until now, the seconds in which this process's cores were idle, or used by it or its descendants."""
    this = psutil.Process()
    every = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
    free = sum(every[core].idle + getattr(every[core], "iowait", 0.0) for core in usable if core < len(every))
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # the process may have exited
            free += sum(process.cpu_times()[:4])  # user and system, of itself and of children that have exited
    return free
