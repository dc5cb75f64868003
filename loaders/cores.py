"""Whose work keeps this process's cores busy: its own, its worker processes', or that of other programs.

It reads Linux's clocks. On other systems all seconds but the elapsed ones are NaN.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .machine import available_cores

LEAST_SECONDS = 0.2  # the system counts idle time in hundredths of a second: a shorter span tells nothing


class CoreSeconds(NamedTuple):
    """Seconds of this process's cores, counted from any one moment: only differences mean something."""

    elapsed: float = 0.0  # wall-clock time (time.perf_counter)
    idle: float = 0.0  # in which the cores did nothing, summed over them
    own: float = 0.0  # in which they ran this process
    workers: float = 0.0  # in which they ran its children, such as worker processes

    def plus(self, later: CoreSeconds, earlier: CoreSeconds) -> CoreSeconds:
        """Returns the sum with the seconds between two moments."""
        return CoreSeconds(*(total + end - start for total, end, start in zip(self, later, earlier, strict=True)))

    @property
    def others(self) -> float:
        """The share (0 to 1) of the cores that other programs used; NaN after less than LEAST_SECONDS.

        On systems other than Linux it is 0.
        """
        if self.elapsed < LEAST_SECONDS:
            return math.nan
        free = self.idle + self.own + self.workers
        return min(1.0, max(0.0, 1 - free / (available_cores() * self.elapsed)))

    @property
    def idle_cores(self) -> float:
        """How many cores were idle on average; NaN if it is not known."""
        return self.idle / self.elapsed if self.elapsed >= LEAST_SECONDS else math.nan

    @property
    def busy_workers(self) -> float:
        """How many cores child processes kept busy on average; NaN if it is not known."""
        return self.workers / self.elapsed if self.elapsed >= LEAST_SECONDS else math.nan


def core_seconds() -> CoreSeconds:
    """Returns the seconds until now. It takes 0.2 ms, and more with many cores."""
    elapsed = time.perf_counter()
    if sys.platform != "linux":
        return CoreSeconds(elapsed, math.nan, math.nan, math.nan)
    running = sum(_cpu_seconds(process.pid) for process in multiprocessing.active_children() if process.pid)
    exited = os.times()  # its seconds of children are those of children that have exited
    workers = running + exited.children_user + exited.children_system
    return CoreSeconds(elapsed, _idle_seconds(), time.process_time(), workers)


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process; 0 if it has exited meanwhile."""
    with suppress(OSError):
        return time.clock_gettime(~pid << 3 | 2)  # its clock, as glibc's clock_getcpuclockid has it
    return 0.0


def _idle_seconds() -> float:
    """Returns how long this process's cores were idle since the system started, summed over them."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name in cores:
            ticks += int(counts[3]) + int(counts[4])  # idle, and idle while a disk works
    return ticks / os.sysconf("SC_CLK_TCK")
