"""The jobs of a sweep, read from their folders, and its settings: jobs that differ in `seed` alone repeat one."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

SIMPLEST = ("torch", "threads", "workers", "prefetch", "resident")  # loaders, the one with the least machinery first


@dataclass(frozen=True)
class Job:
    """One job of a sweep, as read from its folder."""

    number: int
    overrides: list[str]  # as given on the command line: loader=torch
    status: str  # done, failed, or unfinished: interrupted or still running
    summary: dict[str, Any]  # empty unless it is done
    error: str = ""

    @property
    def without_seed(self) -> tuple[str, ...]:
        return tuple(text for text in self.overrides if text.partition("=")[0].lstrip("+") != "seed")

    def metric(self, key: str) -> float | None:
        """The number under `key` in the summary, or None if there is no finite one."""
        value = self.summary.get(key)
        return value if is_number(value) else None

    def quartiles(self) -> tuple[float, float] | None:
        """The 25th and 75th percentile of the speed over windows of the run, in images/s, or None if not measured."""
        value = self.summary.get("images_per_second_quartiles")
        if isinstance(value, list) and len(value) == 3 and all(map(is_number, value)):
            return value[0], value[2]
        return None


@dataclass(frozen=True)
class Setting:
    """One or more jobs with the same overrides, but for the seed."""

    jobs: list[Job]

    @property
    def overrides(self) -> tuple[str, ...]:
        return self.jobs[0].without_seed if len(self.jobs) > 1 else tuple(self.jobs[0].overrides)

    @property
    def command(self) -> str:
        """The line to copy into a shell to run this setting once."""
        return shlex.join(["python", "train.py", *self.overrides])

    @property
    def numbers(self) -> str:
        """Such as "job 2" or "jobs 0, 3, 6"."""
        return ("jobs " if len(self.jobs) > 1 else "job ") + ", ".join(str(job.number) for job in self.jobs)

    @property
    def status(self) -> str:
        """That of its jobs if they share one, else how many are done."""
        statuses = [job.status for job in self.jobs]
        return statuses[0] if len(set(statuses)) == 1 else f"{statuses.count('done')} of {len(statuses)} done"

    @property
    def is_free(self) -> bool:
        """Whether it trained on cached batches: its speed is an upper limit, and its loader not one to use."""
        return any(job.summary.get("loader") == "cached" for job in self.jobs)

    def values(self, key: str) -> list[float]:
        """The numbers that its jobs measured; those that are missing or not finite are left out."""
        return [value for job in self.jobs if (value := job.metric(key)) is not None]

    def metric(self, key: str) -> float | None:
        """The median over the repeats, or None if there is no number; of the accuracy, the mean."""
        middle = statistics.mean if key.startswith("test_") else statistics.median
        return middle(values) if (values := self.values(key)) else None

    def interval(self, key: str) -> tuple[float, float] | None:
        """From the lowest to the highest of several repeats; of one repeat, the quartiles of its speed.

        Both ends are the value itself if nothing is known about its spread. None if there is no value.
        """
        values = self.values(key)
        if len(values) == 1 and key == "images_per_second":
            quartiles = next(job.quartiles() for job in self.jobs if job.metric(key) is not None)
            return quartiles or (values[0], values[0])
        return (min(values), max(values)) if values else None

    def equals(self, other: Setting, key: str) -> bool:
        """Whether the two cannot be told apart: their intervals overlap.

        With three repeats of each, two settings of the same speed are told apart by chance in 10 % of the cases
        (2 of the 20 orders of six numbers), with four in 3 %.
        """
        ours, theirs = self.interval(key), other.interval(key)
        return ours is not None and theirs is not None and ours[0] <= theirs[1] and theirs[0] <= ours[1]

    def complexity(self) -> tuple[Any, ...]:
        """Sorts settings, the simplest first: the loader with the least machinery, the fewest workers, then the lowest
        numbers in the overrides, the fewest overrides, and the first job.
        """
        done = next((job.summary for job in self.jobs if job.summary), {})
        loader, workers = done.get("loader"), done.get("num_workers")
        rank = SIMPLEST.index(loader) if loader in SIMPLEST else len(SIMPLEST)
        given = (text.partition("=")[2] for text in sorted(self.overrides))
        numbers = [number(value) for value in given if number(value) is not None]
        return rank, workers if is_number(workers) else 0, numbers, len(self.overrides), self.jobs[0].number


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and -sys.float_info.max <= value <= sys.float_info.max


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read_job(folder: Path) -> Job:
    try:
        overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):  # only a part of it was written
        overrides = None
    job = partial(Job, int(folder.name), list(map(str, overrides)) if isinstance(overrides, list) else [])
    if (folder / "error.txt").exists():
        error = (folder / "error.txt").read_text(encoding="utf-8", errors="replace")
        return job("failed", {}, " ".join(error.split()) or "its error.txt is empty")
    try:
        return job("done", dict(json.loads((folder / "summary.json").read_text(encoding="utf-8"))))
    except FileNotFoundError:
        return job("unfinished", {}, "it was interrupted, or is still running")
    except (ValueError, TypeError, OSError) as error:
        return job("failed", {}, f"its summary.json cannot be read: {error}")


def settings_of(jobs: list[Job]) -> list[Setting]:
    """The settings, in the order of their first jobs."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.without_seed, []).append(job)
    return [Setting(group) for group in groups.values()]
