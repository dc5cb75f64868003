"""The report of a sweep: a table and a picture of all its settings, and which setting to use.

Jobs that differ only in `seed` repeat one setting; the table has their medians. Settings whose ranges overlap count as
equal, and the report recommends the simplest of them. jobs.py says how jobs are known.
"""

from __future__ import annotations

import csv
import io
import shlex
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from extras.sweep.jobs import STATUSES, Job, read_jobs
from extras.sweep.picture import Bar, Figure, draw_bars
from training.files import write_whole
from training.table import table

SIMPLEST = ("torch", "threads", "workers", "prefetch", "resident")  # the loaders, the simplest first
SPEED, WAITING = "images_per_second", "data_wait_fraction"
SPEED_ONLY = {"loader", "device", "timing", "logger", "callbacks"}  # sections that do not change what a job learns
METRICS = {  # keys of summary.json, their headings in the table, and how their values are written there
    SPEED: ("images/s", "{:,.0f}"),
    WAITING: ("waiting", "{:.1%}"),
    "first_batch_seconds": ("1st batch", "{:.2f} s"),
    "step_ms_p50": ("step p50", "{:.1f} ms"),
    "step_ms_p95": ("step p95", "{:.1f} ms"),
}


class Setting:
    """One or more jobs whose overrides are the same, except for the seed."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs, statuses = jobs, [job.status for job in jobs]
        self.overrides = without_seed(jobs[0]) if len(jobs) > 1 else jobs[0].overrides
        self.command = shlex.join(["python", "train.py", *self.overrides])
        self.numbers = ", ".join(str(job.number) for job in jobs)
        self.status = statuses[0] if len(set(statuses)) == 1 else f"{statuses.count('done')} of {len(jobs)} done"
        self.missing = self.status if self.status != "done" else "not measured"  # in place of a number
        self.summary: dict[str, Any] = next((job.summary for job in jobs if job.summary), {})
        self.is_free = self.summary.get("loader") == "cached"  # its speed is an upper limit, and not a result

    def figure(self, key: str) -> Figure | None:
        """The median over the repeats, with the lowest and highest value; None without a number.

        The speed of a single job has the quartiles of its windows instead.
        """
        values = [job.summary[key] for job in self.jobs if job.summary.get(key) is not None]
        if not values:
            return None
        quartiles = self.summary.get(f"{key}_quartiles") if len(self.jobs) == 1 else None
        return Figure(statistics.median(values), min([*values, *(quartiles or [])]), max([*values, *(quartiles or [])]))

    def complexity(self) -> tuple[float, ...]:
        """A sort key, the smallest for the simplest setting: its loader, workers, number of overrides, first job."""
        loader, workers = self.summary.get("loader"), self.summary.get("num_workers")
        number = workers if isinstance(workers, int) else 0
        return (*SIMPLEST, loader).index(loader), number, len(self.overrides), self.jobs[0].number


class Sweep:
    """The jobs of a sweep, and what they show."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, read_jobs(folder)
        groups: dict[tuple[str, ...], list[Job]] = {}
        for job in self.jobs:
            groups.setdefault(tuple(without_seed(job)), []).append(job)
        self.settings = [Setting(jobs) for jobs in groups.values()]
        given = dict.fromkeys(override for job in self.jobs for override in job.overrides)
        self.constant = [text for text in given if all(text in job.overrides for job in self.jobs)]
        self.keys = list(dict.fromkeys(key_of(text) for text in given if text not in self.constant))
        keys = [key for key in self.keys if key != "seed"]
        last = {key: key.rpartition(".")[2] for key in keys}  # is enough if it is not that of another key too
        self.names = last if len(set(last.values())) == len(keys) else dict(zip(keys, keys, strict=True))
        done = next((job.summary for job in self.jobs if job.summary), {})
        self.score, self.sign = done.get("score", "test_accuracy"), -1 if done.get("lower_is_better") else 1
        # Free data are comparable if nothing but the loader differs between jobs.
        self.sections = {key.lstrip("+").partition(".")[0] for key in keys}
        free = [one.figure(SPEED) for one in self.settings if one.is_free and self.sections <= {"loader"}]
        self.ceiling: float | None = max([figure.value for figure in free if figure], default=None)
        self.fastest = self.best(SPEED)

    def best(self, key: str, sign: int = 1) -> list[Setting]:
        """The setting with the best number under `key`, and those that are equal to it, the simplest one first."""
        given = [(one, figure) for one in self.settings if not one.is_free and (figure := one.figure(key))]
        best = max((figure for _, figure in given), key=lambda figure: sign * figure.value, default=None)
        return sorted((one for one, figure in given if best and figure.overlaps(best)), key=Setting.complexity)

    def mark(self, setting: Setting) -> str:
        """ ">" for the setting to use, "=" for those that are as fast, else " "."""
        return (">" if setting is self.fastest[0] else "=") if setting in self.fastest else " "

    def label(self, jobs: list[Job]) -> str:
        """The values of the keys that vary, such as "job 2 (loader=torch num_workers=2)"."""
        given = values_of(jobs[0].overrides)
        overrides = " ".join(f"{name}={given[key]}" for key, name in self.names.items() if key in given)
        name = f"{len(jobs)} runs" if len(jobs) > 1 else f"job {jobs[0].number}"
        return f"{name} ({overrides})" if overrides else name

    def text(self) -> str:
        """The report for a terminal: the table, the best setting with its command, and the jobs that are not done."""
        counts = Counter(job.status for job in self.jobs)
        headline = "Jobs: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        headline += f"; all with {' '.join(self.constant)}" if self.constant else ""
        not_done = [f"{job.status.capitalize()}: {self.label([job])}: {job.error}" for job in self.jobs if job.error]
        lines = [f"Sweep {self.folder}", headline, "", *self._table(), *self._advice(), "", *not_done]
        return "\n".join(lines).rstrip()

    def _table(self) -> list[str]:
        """The lines of a table with a row per setting. Its columns are the keys that vary, and the known metrics."""
        settings = self.settings
        columns = [["job", *(setting.numbers for setting in settings)]]
        for key, name in self.names.items():
            columns.append([name, *(values_of(setting.overrides).get(key, "-") for setting in settings)])
        for key, (heading, text) in METRICS.items():
            figures = [setting.figure(key) for setting in settings]
            columns.append([heading, *(text.format(figure.value) if figure else "-" for figure in figures)])
            if key == SPEED:
                columns.append(["range", *(figure.range(text) if figure else "-" for figure in figures)])
        columns.append([self.score.removeprefix("test_"), *(self._score(one) or "-" for one in settings)])
        columns = [column for column in columns if set(column[1:]) != {"-"}]
        if any(job.status != "done" for job in self.jobs):
            columns.append(["status", *(setting.status for setting in settings)])
        marks = [" ", *map(self.mark, settings)]
        return [f"{mark} {line}".rstrip() for mark, line in zip(marks, table(columns), strict=True)]

    def _score(self, setting: Setting) -> str:
        figure = setting.figure(self.score)
        return f"{figure.value:.4f}" if figure else ""

    def _advice(self) -> list[str]:
        """Sentences and commands: the fastest setting, and the most accurate one if it is another."""
        lines = []
        if self.fastest and (speed := self.fastest[0].figure(SPEED)):
            found = f"{speed.value:,.0f} images/s"
            if waiting := self.fastest[0].figure(WAITING):
                found += f", {waiting.value:.1%} of the time spent waiting for data"
            if self.ceiling:
                found += f" ({speed.value / self.ceiling:.0%} of the speed with free data)"
            lines += self._named("Fastest", self.fastest, found)
        best = [] if self.sections <= SPEED_ONLY else self.best(self.score, self.sign)
        if best and self.fastest[:1] != best[:1] and not any(one in best for one in self.fastest[:1]):
            lines += self._named("Best score", best, f"{self.score.replace('_', ' ')} {self._score(best[0])}")
        return lines

    def _named(self, best: str, equals: list[Setting], found: str) -> list[str]:
        simplest = equals[0]
        if len(equals) > 1:
            labels = "; ".join(self.label(setting.jobs) for setting in equals)
            best = f"{best}, and equal within their ranges: {labels}.\nThe simplest of them"
        jobs = f"{'job' if len(simplest.jobs) == 1 else 'jobs'} {simplest.numbers}"
        return ["", f"{best}: {jobs}, {found}. Use it by:", f"  {simplest.command}"]

    def csv(self) -> str:
        """A row per job, with the full names of all keys, including the seed."""
        text, metrics = io.StringIO(), [*METRICS, self.score]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["job", *(key.lstrip("+") for key in self.keys), *metrics, "status", "error", "folder"])
        for job in self.jobs:
            values = map(values_of(job.overrides).get, self.keys)
            row = [job.number, *values, *map(job.summary.get, metrics), job.status, job.error, job.folder]
            writer.writerow(row)
        return text.getvalue()

    def picture(self) -> bytes:
        """A PNG with a bar per setting; free data are a dashed line."""
        shown = [one for one in self.settings if self.ceiling is None or not one.is_free] or self.settings
        title = "No job measured its speed"
        if self.fastest:
            title = f"{len(self.fastest)} are equally fast; the simplest is" if len(self.fastest) > 1 else "Fastest:"
            title += f" {self.label(self.fastest[0].jobs)}"
        bars = [
            Bar(self.label(one.jobs), self.mark(one), one.figure(SPEED), one.figure(WAITING), one.missing)
            for one in shown
        ]
        return draw_bars(title, bars, self.ceiling)


def key_of(override: str) -> str:
    return override.partition("=")[0]


def without_seed(job: Job) -> list[str]:
    return [text for text in job.overrides if key_of(text) != "seed"]


def values_of(overrides: list[str]) -> dict[str, str]:
    return {key: value for key, _, value in (override.partition("=") for override in overrides)}


def write_report(folder: Path) -> None:
    """Writes `sweep.csv`, `sweep.md` and `sweep.png` into the sweep's folder, each whole or not at all.

    Several jobs may do so at the same time, without a lock: each looks at the jobs again after writing, and writes
    again if they have changed, so that the last report that is written has every job.
    """
    sweep, written = Sweep(folder), ""
    while sweep.csv() != written:
        written = sweep.csv()
        page = f"# Sweep {folder.name}\n\n```\n{sweep.text()}\n```\n\n![Speed and waiting of each setting](sweep.png)\n"
        write_whole(folder / "sweep.csv", written)
        write_whole(folder / "sweep.md", page)
        write_whole(folder / "sweep.png", sweep.picture())
        sweep = Sweep(folder)
