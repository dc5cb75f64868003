"""The jobs of a sweep, read from their folders, and its settings: jobs that differ only in `seed` repeat a setting."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None


class Figure(NamedTuple):
    """A number in the report, and the ends of its spread."""

    value: float
    low: float
    high: float

    def overlaps(self, other: Figure) -> bool:
        """Whether neither counts as better.

        Two settings of the same speed seem different by chance in 10 % of the cases with three repeats of each (2 of
        the 20 orders of six numbers), and in 3 % with four.
        """
        return self.low <= other.high and other.low <= self.high


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

    def figure(self, key: str) -> Figure | None:
        """The median over the repeats, or for a score of the test set the mean, with the lowest and highest value.

        The speed of a single job has the quartiles of its windows instead. None without a number.
        """
        values = [value for job in self.jobs if (value := job.metric(key)) is not None]
        if not values:
            return None
        average = statistics.mean if key.startswith("test_") else statistics.median
        quartiles = self.jobs[0].summary.get(f"{key}_quartiles") if len(self.jobs) == 1 else None
        spread = [*values, *(quartiles or [])]
        return Figure(average(values), min(spread), max(spread))

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
