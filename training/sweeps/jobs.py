"""The jobs of a sweep, read from their folders, and its settings: jobs that differ only in `seed` repeat a setting."""

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

SIMPLEST = ("torch", "threads", "workers", "prefetch", "resident")  # the loaders, the simplest first


@dataclass(frozen=True)
class Job:
    """One job of a sweep, as read from its folder."""

    number: int
    overrides: list[str]  # as given on the command line: loader=torch
    status: str  # done, failed, or unfinished (interrupted, or still running)
    summary: dict[str, Any]  # content of summary.json; empty if the job is not done
    error: str = ""  # why it is not done

    @property
    def without_seed(self) -> tuple[str, ...]:
        return tuple(text for text in self.overrides if text.partition("=")[0].lstrip("+") != "seed")

    def metric(self, key: str) -> float | None:
        """The number under `key` in the summary; None if it is missing or not finite."""
        value = self.summary.get(key)
        return value if is_number(value) else None

    def quartiles(self) -> tuple[float, float] | None:
        """The 25th and 75th percentile of the speed over the run, in images/s; None if they were not measured."""
        value = self.summary.get("images_per_second_quartiles")
        if isinstance(value, list) and len(value) == 3 and all(map(is_number, value)):
            return value[0], value[2]
        return None


@dataclass(frozen=True)
class Setting:
    """One or more jobs whose overrides are the same, except for the seed."""

    jobs: list[Job]

    @property
    def overrides(self) -> tuple[str, ...]:
        return self.jobs[0].without_seed if len(self.jobs) > 1 else tuple(self.jobs[0].overrides)

    @property
    def command(self) -> str:
        """The shell command that runs this setting once."""
        return shlex.join(["python", "train.py", *self.overrides])

    @property
    def numbers(self) -> str:
        """The numbers of the jobs, such as "job 2" or "jobs 0, 3, 6"."""
        return ("jobs " if len(self.jobs) > 1 else "job ") + ", ".join(str(job.number) for job in self.jobs)

    @property
    def status(self) -> str:
        """The status of its jobs if it is the same for all, else how many are done."""
        statuses = [job.status for job in self.jobs]
        return statuses[0] if len(set(statuses)) == 1 else f"{statuses.count('done')} of {len(statuses)} done"

    @property
    def is_free(self) -> bool:
        """Whether it trained on cached batches: then its speed is an upper limit, and not a result."""
        return any(job.summary.get("loader") == "cached" for job in self.jobs)

    def values(self, key: str) -> list[float]:
        """The numbers under `key` in the summaries of its jobs; leaves out what is missing or not finite."""
        return [value for job in self.jobs if (value := job.metric(key)) is not None]

    def metric(self, key: str) -> float | None:
        """The median over the repeats, or for a score of the test set the mean; None without a number."""
        values, average = self.values(key), statistics.mean if key.startswith("test_") else statistics.median
        return average(values) if values else None

    def interval(self, key: str) -> tuple[float, float] | None:
        """The spread: the lowest and highest value of several repeats; with one repeat, the quartiles of its speed.

        Both ends are the value itself if its spread is not known. None without a value.
        """
        values = self.values(key)
        if len(values) == 1 and key == "images_per_second":
            quartiles = next(job.quartiles() for job in self.jobs if job.metric(key) is not None)
            return quartiles or (values[0], values[0])
        return (min(values), max(values)) if values else None

    def equals(self, other: Setting, key: str) -> bool:
        """Whether the intervals of the two settings overlap, so that neither counts as better.

        Two settings of the same speed seem different by chance in 10 % of the cases with three repeats of each (2 of
        the 20 orders of six numbers), and in 3 % with four.
        """
        ours, theirs = self.interval(key), other.interval(key)
        return ours is not None and theirs is not None and ours[0] <= theirs[1] and theirs[0] <= ours[1]

    def complexity(self) -> tuple[Any, ...]:
        """A sort key, the smallest for the simplest setting.

        It compares the loader (SIMPLEST), the number of workers, the numbers in the overrides, how many overrides
        there are, and the number of the first job.
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
    """Reads a job from its folder. Files that are missing or damaged make it unfinished or failed."""
    try:
        overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):  # the file is incomplete
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
    """Groups the jobs by setting, in the order of their first jobs."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.without_seed, []).append(job)
    return [Setting(group) for group in groups.values()]
