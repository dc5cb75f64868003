"""The jobs of a sweep, read from their folders, and its settings: jobs that differ only in `seed` repeat a setting."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SIMPLEST = ("torch", "threads", "workers", "prefetch", "resident")  # the loaders, the simplest first
SPEED = "images_per_second"


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
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None


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
        """The numbers of the jobs, such as "2" or "0, 3, 6"."""
        return ", ".join(str(job.number) for job in self.jobs)

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

    def interval(self, key: str) -> tuple[float, float]:
        """The spread: the lowest and highest value of several repeats; with one repeat, the quartiles of its speed.

        Both ends are the value itself if its spread is not known. Raises ValueError without a value.
        """
        values = self.values(key)
        if key == SPEED and len(values) == 1:
            quartiles = [job.summary.get(f"{SPEED}_quartiles") for job in self.jobs if job.metric(key) is not None]
            values += quartiles[0] or []
        return min(values), max(values)

    def equals(self, other: Setting, key: str) -> bool:
        """Whether the intervals of the two settings overlap, so that neither counts as better.

        Two settings of the same speed seem different by chance in 10 % of the cases with three repeats of each (2 of
        the 20 orders of six numbers), and in 3 % with four.
        """
        ours, theirs = self.interval(key), other.interval(key)
        return ours[0] <= theirs[1] and theirs[0] <= ours[1]

    def complexity(self) -> tuple[float, ...]:
        """A sort key, the smallest for the simplest setting.

        It compares the loader (SIMPLEST), the number of workers, how many overrides there are, and the first job.
        """
        done: dict[str, Any] = next((job.summary for job in self.jobs if job.summary), {})
        loader, workers = done.get("loader"), done.get("num_workers") or 0
        rank = SIMPLEST.index(loader) if loader in SIMPLEST else len(SIMPLEST)
        return rank, workers, len(self.overrides), self.jobs[0].number


def read_job(folder: Path) -> Job:
    """Reads a job from its folder. Files that are missing or damaged make it unfinished or failed."""
    overrides, number = [], int(folder.name)
    with suppress(yaml.YAMLError):  # the job is just being started
        overrides = [str(text) for text in yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()) or []]
    if (folder / "error.txt").exists():
        error = (folder / "error.txt").read_text(errors="replace")
        return Job(number, overrides, "failed", {}, " ".join(error.split()) or "its error.txt is empty")
    try:
        return Job(number, overrides, "done", dict(json.loads((folder / "summary.json").read_text())))
    except FileNotFoundError:
        return Job(number, overrides, "unfinished", {}, "it was interrupted, or is still running")
    except (ValueError, TypeError, OSError) as error:
        return Job(number, overrides, "failed", {}, f"its summary.json cannot be read: {error}")


def settings_of(jobs: list[Job]) -> list[Setting]:
    """Groups the jobs by setting, in the order of their first jobs."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.without_seed, []).append(job)
    return [Setting(group) for group in groups.values()]
