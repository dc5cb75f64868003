"""The report of a sweep: a table and a picture of all its settings, and which setting to use.

Jobs that differ only in `seed` repeat one setting; the table has their medians. Settings whose ranges overlap count as
equal, and the report names the simplest of them.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from extras.sweep.picture import Bar, draw_bars
from training.files import write_whole
from training.table import table

NOTES = ".sweep"  # the folder of the jobs' notes
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


class Job:
    """A job, read from its file in .sweep/. summary: the content of its summary.json; empty until it is done."""

    def __init__(self, number: int, folder: str, overrides: list[str], status: str, error: str) -> None:
        self.number, self.folder, self.overrides, self.status, self.error = number, folder, overrides, status, error
        self.values = dict(text.partition("=")[::2] for text in overrides)
        self.setting = tuple(text for text in overrides if not text.startswith("seed="))
        path, self.summary = Path(folder, "summary.json"), dict[str, Any]()
        try:
            self.summary = dict(json.loads(path.read_text())) if status == "done" else {}
        except (OSError, TypeError, ValueError) as damage:  # the other jobs have theirs
            self.status, self.error = "damaged", f"{path} cannot be read ({damage}): run the job again"


class Range(NamedTuple):
    """The median of a setting's numbers, the lowest and the highest."""

    value: float
    low: float
    high: float


class Setting:
    """One or more jobs whose overrides are the same, except for the seed."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs, statuses = jobs, [job.status for job in jobs]
        self.command = shlex.join(["python", "train.py", *(jobs[0].setting if len(jobs) > 1 else jobs[0].overrides)])
        self.numbers = ", ".join(str(job.number) for job in jobs)
        self.status = statuses[0] if len(set(statuses)) == 1 else f"{statuses.count('done')} of {len(jobs)} done"
        self.summary: dict[str, Any] = next((job.summary for job in jobs if job.summary), {})
        self.is_free = self.summary.get("loader") == "cached"  # its speed is an upper limit, and not a result

    def numbers_of(self, key: str) -> Range | None:
        """None without a number. The speed of a single job has the quartiles of its parts as its range."""
        values = [job.summary[key] for job in self.jobs if job.summary.get(key) is not None]
        if not values:
            return None
        every = [*values, *(self.summary.get(f"{key}_quartiles") or [] if len(self.jobs) == 1 else [])]
        return Range(statistics.median(values), min(every), max(every))

    def complexity(self) -> tuple[float, ...]:
        """A sort key, the smallest for the simplest setting: its loader, workers, number of overrides, first job."""
        loader, workers = self.summary.get("loader"), self.summary.get("num_workers")
        number = workers if isinstance(workers, int) else 0
        return (*SIMPLEST, loader).index(loader), number, len(self.jobs[0].setting), self.jobs[0].number


class Sweep:
    """The jobs of a sweep, and what they show."""

    def __init__(self, folder: Path) -> None:
        notes = [json.loads(path.read_text()) for path in (folder / NOTES).glob("[0-9]*.json")]
        self.folder, self.jobs = folder, sorted((Job(**note) for note in notes), key=lambda job: job.number)
        settings = dict.fromkeys(job.setting for job in self.jobs)
        self.settings = [Setting([job for job in self.jobs if job.setting == one]) for one in settings]
        keys = dict.fromkeys(key for job in self.jobs for key in job.values)
        self.keys = [key for key in keys if len({job.values.get(key) for job in self.jobs}) > 1]
        done = next((job.summary for job in self.jobs if job.summary), {})
        self.score, self.sign = done.get("score", "test_accuracy"), -1 if done.get("lower_is_better") else 1
        self.metrics = METRICS | {self.score: (self.score.removeprefix("test_"), "{:.4f}")}
        # Free data are comparable if nothing but the loader differs between jobs.
        self.sections = {key.lstrip("+").partition(".")[0] for key in self.keys} - {"seed"}
        free = [found.value for one in self.settings if one.is_free and (found := one.numbers_of(SPEED))]
        self.ceiling = max(free, default=None) if self.sections <= {"loader"} else None
        self.fastest = self.best(SPEED)

    def best(self, key: str, sign: int = 1) -> list[Setting]:
        """The setting with the best number under `key`, and those that are equal to it, the simplest one first."""
        given = {one: found for one in self.settings if not one.is_free and (found := one.numbers_of(key))}
        best = max(given.values(), key=lambda found: sign * found.value, default=Range(0.0, 0.0, 0.0))
        equal = [one for one, found in given.items() if found.low <= best.high and best.low <= found.high]
        return sorted(equal, key=Setting.complexity)

    def mark(self, setting: Setting) -> str:
        """ ">" for the setting to use, "=" for those that are as fast, else " "."""
        return (">" if setting is self.fastest[0] else "=") if setting in self.fastest else " "

    def cell(self, setting: Setting, key: str) -> str:
        found = setting.numbers_of(key)
        return self.metrics[key][1].format(found.value) if found else "-"

    def label(self, jobs: list[Job]) -> str:
        """The values of the keys that vary, such as "job 2 (loader=torch num_workers=2)"."""
        values = jobs[0].values
        given = (f"{key.rpartition('.')[2]}={values[key]}" for key in self.keys if key in values and key != "seed")
        return f"{f'{len(jobs)} runs' if len(jobs) > 1 else f'job {jobs[0].number}'} ({' '.join(given)})"

    def text(self) -> str:
        """The report for a terminal: the table, the best setting with its command, and the jobs that are not done."""
        counts = Counter(job.status for job in self.jobs)
        not_done = [f"{job.status.capitalize()}: {self.label([job])}: {job.error}" for job in self.jobs if job.error]
        lines = [f"Sweep {self.folder}", "Jobs: " + ", ".join(f"{number} {name}" for name, number in counts.items())]
        return "\n".join([*lines, "", *self._table(), *self._advice(), "", *not_done]).rstrip()

    def _table(self) -> list[str]:
        """The lines of a table with a row per setting. Its columns are the keys that vary, and the known metrics."""
        columns: list[list[str]] = [["job", *(one.numbers for one in self.settings)]]
        for key in self.keys:
            columns.append([key, *(one.jobs[0].values.get(key, "-") for one in self.settings)])
        for key, (heading, _) in self.metrics.items():
            columns.append([heading, *(self.cell(one, key) for one in self.settings)])
        columns.append(["status", *(one.status for one in self.settings)])
        columns = [column for column in columns if column[0] != "seed" and set(column[1:]) != {"-"}]
        marks = [" ", *map(self.mark, self.settings)]
        return [f"{mark} {line}".rstrip() for mark, line in zip(marks, table(columns), strict=True)]

    def _advice(self) -> list[str]:
        """Sentences and commands: the fastest setting, and the one with the best score if that is another."""
        lines = []
        if self.fastest and (speed := self.fastest[0].numbers_of(SPEED)):
            found = f"{speed.value:,.0f} images/s ({speed.low:,.0f} to {speed.high:,.0f})"
            found += f", {self.cell(self.fastest[0], WAITING)} of the time spent waiting for data"
            found += f"; free data: {self.ceiling:,.0f} images/s" if self.ceiling else ""
            lines += self._named("Fastest", self.fastest, found)
        best = [] if self.sections <= SPEED_ONLY else self.best(self.score, self.sign)
        if best and not any(one in best for one in self.fastest[:1]):
            lines += self._named("Best score", best, f"{self.score} {self.cell(best[0], self.score)}")
        return lines

    def _named(self, best: str, equals: list[Setting], found: str) -> list[str]:
        if len(equals) > 1:
            labels = "; ".join(self.label(setting.jobs) for setting in equals)
            best = f"{best}, and equal within their ranges: {labels}.\nThe simplest of them"
        return ["", f"{best}: job {equals[0].numbers}, {found}. Use it by", f"  {equals[0].command}"]

    def csv(self) -> str:
        """A row per job, with the full names of all keys, including the seed."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["job", *(key.lstrip("+") for key in self.keys), *self.metrics, "status", "error", "folder"])
        for job in self.jobs:
            values = *map(job.values.get, self.keys), *map(job.summary.get, self.metrics)
            writer.writerow([job.number, *values, job.status, job.error, job.folder])
        return text.getvalue()

    def picture(self) -> bytes:
        """A PNG with a bar per setting; free data are a dashed line."""
        title = f"Fastest: {self.label(self.fastest[0].jobs)}" if self.fastest else "No job measured its speed"
        title += f", the simplest of {len(self.fastest)} that are equally fast" if len(self.fastest) > 1 else ""
        bars = []
        for one in [one for one in self.settings if self.ceiling is None or not one.is_free] or self.settings:
            speed = one.numbers_of(SPEED)
            text = f"{self.cell(one, SPEED)}, {self.cell(one, WAITING)}" if speed else one.status
            bars.append(Bar(self.label(one.jobs), self.mark(one), speed or Range(0.0, 0.0, 0.0), text))
        return draw_bars(title, bars, self.ceiling)


def write_report(folder: Path) -> None:
    """Writes `sweep.csv`, `sweep.md` and `sweep.png` into the sweep's folder, each whole or not at all.

    Several jobs may do so at the same time, without a lock: each looks at the jobs again after writing, and writes
    again if they have changed, so that the last report that is written has every job.
    """
    written = ""
    while (sweep := Sweep(folder)).csv() != written:
        written = sweep.csv()
        page = f"# Sweep {folder.name}\n\n```\n{sweep.text()}\n```\n\n![Speed of each setting](sweep.png)\n"
        write_whole(folder / "sweep.csv", written)
        write_whole(folder / "sweep.md", page)
        write_whole(folder / "sweep.png", sweep.picture())
