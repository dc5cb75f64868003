"""The cores and the memory that this process may use, given its affinity, cgroup limits and torchrun's other ranks.

os.cpu_count() counts the machine's cores; in a container or a Slurm job most of them may belong to others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def available_cores(root: Path = ROOT) -> int:
    """Returns how many cores this process may keep busy, at least 1.

    That is the smaller of its affinity and its cgroup's CPU quota (v1 or v2, rounded up), divided by the number of
    ranks that torchrun started on this machine (LOCAL_WORLD_SIZE). `root` is the folder that has proc/ and sys/.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    limits = [len(affinity(0)) if affinity else os.cpu_count() or 1, *_quotas(root)]
    return max(1, math.ceil(min(limits)) // _local_ranks())


def available_memory(root: Path = ROOT) -> int | None:
    """Returns this rank's share, in bytes, of the memory that is free, or of its cgroup's limit if that is less.

    Returns None if the system tells neither.
    """
    limits: list[float] = list(_memory_limits(root))
    with suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(1024 * int(line.split()[1]))
    return int(min(limits)) // _local_ranks() if limits else None


def _local_ranks() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(ranks)) if ranks.isdecimal() else 1


def _quotas(root: Path) -> Iterator[float]:
    """Yields each CPU quota, in cores."""
    for words in _limits(root, ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with suppress(ValueError):  # "max": no limit
            quota, period = map(float, words)
            if min(quota, period) > 0:
                yield quota / period


def _memory_limits(root: Path) -> Iterator[float]:
    """Yields the bytes that each memory limit leaves. Cached files do not count as used, unless they are in use."""
    v2 = ["memory.max", "memory.current", "memory.stat"]
    v1 = ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"]
    for words in _limits(root, v2, v1):
        with suppress(ValueError):
            limit, used, *stat = words
            cached = dict(zip(stat[::2], stat[1::2], strict=True)).get("inactive_file", "0")
            yield max(0.0, float(limit) - float(used) + float(cached))


def _limits(root: Path, v2: list[str], v1: list[str]) -> Iterator[list[str]]:
    """Yields the words in these files of this process's cgroup and of each cgroup above it."""
    groups = ""
    with suppress(OSError):
        groups = (root / "proc/self/cgroup").read_text(errors="replace")
    for line in groups.splitlines():
        parts = line.split(":", 2)
        if len(parts) < 3:
            continue
        _, controllers, path = parts
        names = v1 if controllers else v2
        folder = root / "sys/fs/cgroup" / controllers
        # In a container the path may be the host's, which does not exist here: then `folder` itself has the limit.
        for group in (Path(path), *Path(path).parents):
            with suppress(OSError):
                yield " ".join((folder / str(group).lstrip("/") / name).read_text() for name in names).split()
