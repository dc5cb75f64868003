"""The report of a sweep: a table and a picture of all its settings, and which setting to use.

Jobs that differ only in REPEATS repeat one setting. A sweep over how data are loaded is about speed: the table has the
medians, settings whose ranges overlap count as equal, and the report names the simplest of them. Any other sweep is
about the score: the table has the mean and standard deviation, and the best setting first.
"""

import csv
import io
import os
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from data.errors import DataError
from extras.sweep.picture import Bar, draw_bars, draw_scores
from training.files import read_json, write_whole
from training.look import embedded, table, write_page

PAGE = Path(__file__).with_name("sweep.html")
NOTES = ".sweep"  # the folder of the jobs' notes
EARLIER = "earlier"  # a file in it: the reports in the sweep's folder are of an earlier sweep
SIMPLEST = ("torch", "threads", "workers", "prefetch", "resident")  # the loaders, the simplest first
SPEED = "images_per_second"
WAITING = "data_wait_fraction"
SPEED_ONLY = {"loader", "device", "timing", "logger"}  # sections that do not change what a job learns
REPEATS = {"seed", "data.fold"}
METRICS = {  # keys of summary.json, their headings in the table, and how their values are written there
    SPEED: ("images/s", "{:,.0f}"),
    WAITING: ("waiting", "{:.1%}"),
    "first_batch_seconds": ("1st batch", "{:.2f} s"),
    "step_ms_p50": ("step p50", "{:.1f} ms"),
    "step_ms_p95": ("step p95", "{:.1f} ms"),
}


class Job:
    """A job, read from its file in .sweep/. summary: the content of its summary.json; empty until it is done."""

    def __init__(
        self, number: int, folder: str, overrides: list[str], status: str, error: str, flags: Sequence[str] = ()
    ) -> None:
        self.number = number
        self.folder = folder
        self.flags = flags
        self.overrides = overrides
        self.status = status
        self.error = error
        self.values = dict(text.partition("=")[::2] for text in overrides)
        self.setting = tuple(text for text in overrides if text.partition("=")[0] not in REPEATS)
        self.summary: dict[str, Any] = {}
        if status == "done":
            self._read_summary()

    def page(self, folder: Path) -> str:
        """The address of its report.html in a page in `folder`; empty if it has none."""
        path = Path(self.folder, "report.html")
        return quote(os.path.relpath(path, folder)) if path.exists() else ""

    def _read_summary(self) -> None:
        path = Path(self.folder, "summary.json")
        try:
            self.summary = read_json(path)
        except (OSError, DataError) as damage:  # the report still shows the other jobs
            self.status = "damaged"
            self.error = f"{path} cannot be read ({damage}): run the job again"


class Spread(NamedTuple):
    """The middle of a setting's numbers, and their range."""

    value: float
    low: float
    high: float

    def overlaps(self, other: "Spread") -> bool:
        return self.low <= other.high and other.low <= self.high


class Setting:
    """One or more jobs whose overrides are the same, except for REPEATS. score: the key of their score."""

    def __init__(self, jobs: list[Job], score: str) -> None:
        self.jobs = jobs
        self.score = score
        overrides = jobs[0].overrides
        if len(jobs) > 1:
            overrides = [text for text in jobs[0].setting if not text.startswith("data.folds=")]  # needs data.fold
        self.command = shlex.join(["python", "train.py", *jobs[0].flags, *overrides])
        self.numbers = ", ".join(str(job.number) for job in jobs)
        statuses = Counter(job.status for job in jobs)
        self.status = jobs[0].status if len(statuses) == 1 else f"{statuses['done']} of {len(jobs)} done"
        self.summary: dict[str, Any] = next((job.summary for job in jobs if job.summary), {})
        self.is_free = self.summary.get("loader") == "cached"  # its speed is an upper limit, and not a result

    def values_of(self, key: str) -> list[float]:
        """The numbers of the jobs that have one."""
        return [job.summary[key] for job in self.jobs if job.summary.get(key) is not None]

    def spread_of(self, key: str) -> Spread | None:
        """Of scores their mean, with the standard deviation on both sides, 0 of one; of others the median and range.

        The speed of a single job has the quartiles of its parts as its range. None without a number.
        """
        values = self.values_of(key)
        if not values:
            return None
        if key == self.score:
            mean = statistics.fmean(values)
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            return Spread(mean, mean - deviation, mean + deviation)
        quartiles = self.summary.get(f"{key}_quartiles") or []
        measured = [*values, *quartiles] if len(self.jobs) == 1 else values
        return Spread(statistics.median(values), min(measured), max(measured))

    def complexity(self) -> tuple[float, ...]:
        """A sort key, the smallest for the simplest setting: its loader, workers, number of overrides, first job."""
        loader = self.summary.get("loader")
        workers = self.summary.get("num_workers")
        number = workers if isinstance(workers, int) else 0
        first = self.jobs[0]
        return (*SIMPLEST, loader).index(loader), number, len(first.setting), first.number


class Sweep:
    """The jobs of a sweep, and what they show."""

    def __init__(self, folder: Path) -> None:
        notes = [read_json(path) for path in (folder / NOTES).glob("[0-9]*.json")]
        self.folder = folder
        self.jobs = sorted((Job(**note) for note in notes), key=lambda job: job.number)
        jobs_by_setting: dict[tuple[str, ...], list[Job]] = {}
        for job in self.jobs:
            jobs_by_setting.setdefault(job.setting, []).append(job)
        summary = next((job.summary for job in self.jobs if job.summary), {})
        self.score = summary.get("score", "test_accuracy")
        self.score_key = "best_score" if "best_score" in summary else self.score
        self.settings = [Setting(jobs, self.score_key) for jobs in jobs_by_setting.values()]
        self.keys = self._varying_keys()
        self.sections = {key.lstrip("+").partition(".")[0] for key in self.keys if key not in REPEATS}
        repeats_alone = bool(self.keys) and not self.sections
        self.is_about_score = repeats_alone or not self.sections <= SPEED_ONLY
        self.key = self.score_key if self.is_about_score else SPEED
        self.sign = -1 if self.is_about_score and summary.get("lower_is_better") else 1
        scores = {self.score_key: (self.score.removeprefix("test_"), "{:.4f}")}
        self.metrics = scores | METRICS if self.is_about_score else METRICS | scores
        self.ceiling = self._ceiling()
        self.best: list[Setting] = []  # with those that are equal to it: first the one to use
        self._rank()

    def _varying_keys(self) -> list[str]:
        """The overridden keys whose values differ between the jobs, in the order of their first use."""
        values: dict[str, set[str | None]] = {key: set() for job in self.jobs for key in job.values}
        for key, seen in values.items():
            seen.update(job.values.get(key) for job in self.jobs)
        return [key for key, seen in values.items() if len(seen) > 1]

    def _ceiling(self) -> float | None:
        """The speed with free data; None if more than the loader differs between jobs, which would not compare."""
        speeds = [setting.spread_of(SPEED) for setting in self.settings if setting.is_free]
        values = [speed.value for speed in speeds if speed is not None]
        return max(values, default=None) if self.sections <= {"loader"} else None

    def _rank(self) -> None:
        """Finds the best settings. Sorts all by their score, or those that are equally fast by their complexity."""
        spreads = [(setting, setting.spread_of(self.key)) for setting in self.settings if not setting.is_free]
        measured = [(setting, spread) for setting, spread in spreads if spread is not None]
        measured.sort(key=lambda pair: -self.sign * pair[1].value)
        self.best = [setting for setting, spread in measured if spread.overlaps(measured[0][1])]
        if self.is_about_score:
            places = {setting: place for place, (setting, _) in enumerate(measured)}
            self.settings.sort(key=lambda setting: places.get(setting, len(places)))
        else:
            self.best.sort(key=Setting.complexity)

    def mark(self, setting: Setting) -> str:
        """ ">" for the setting to use, "=" for those that are equal, else " "."""
        if setting not in self.best:
            return " "
        return ">" if setting is self.best[0] else "="

    def cell(self, setting: Setting, key: str) -> str:
        spread = setting.spread_of(key)
        if spread is None:
            return "-"
        _, form = self.metrics[key]
        text = form.format(spread.value)
        if key == self.score_key and len(setting.jobs) > 1:
            text += f" +- {form.format(spread.high - spread.value)}"
            count = len(setting.values_of(key))
            if count < len(setting.jobs):
                text += f" ({count} of {len(setting.jobs)})"
        return text

    def label(self, jobs: list[Job]) -> str:
        """The values of the keys that vary, such as "job 2 (loader=torch num_workers=2)"."""
        values = jobs[0].values
        keys = [key for key in self.keys if key in values and (len(jobs) == 1 or key not in REPEATS)]
        settings = " ".join(f"{key.rpartition('.')[2]}={values[key]}" for key in keys)
        name = f"{len(jobs)} runs" if len(jobs) > 1 else f"job {jobs[0].number}"
        return f"{name} ({settings})" if settings else name

    def text(self) -> str:
        """The report for a terminal: the table, the best setting with its command, and the jobs that are not done."""
        counts = Counter(job.status for job in self.jobs)
        counted = ", ".join(f"{number} {status}" for status, number in counts.items())
        lines = [f"Sweep {self.folder}", f"Jobs: {counted}", "", *self._table(), *self.advice(), ""]
        for job in self.jobs:
            if job.error:
                lines.append(f"{job.status.capitalize()}: {self.label([job])}: {job.error}")
        return "\n".join(lines).rstrip()

    def columns(self) -> list[list[str]]:
        """A table with a row per setting, below headings: columns of the keys that vary, and of the known metrics."""
        settings = self.settings
        columns: list[list[str]] = [["job", *(setting.numbers for setting in settings)]]
        for key in self.keys:
            columns.append([key, *(setting.jobs[0].values.get(key, "-") for setting in settings)])
        for key, (heading, _) in self.metrics.items():
            columns.append([heading, *(self.cell(setting, key) for setting in settings)])
        columns.append(["status", *(setting.status for setting in settings)])
        single = len(self.settings) == len(self.jobs)
        hidden = set() if single else REPEATS
        return [column for column in columns if column[0] not in hidden and set(column[1:]) != {"-"}]

    def _table(self) -> list[str]:
        marks = [" ", *map(self.mark, self.settings)]
        return [f"{mark} {line}".rstrip() for mark, line in zip(marks, table(self.columns()), strict=True)]

    def advice(self) -> list[str]:
        """A sentence with the setting to use, and its command."""
        if not self.best:
            return []
        first = self.best[0]
        speed = first.spread_of(SPEED)
        labels = "; ".join(self.label(setting.jobs) for setting in self.best)
        equal = f", and equal within their ranges: {labels}.\nThe" if len(self.best) > 1 else ""
        if self.is_about_score:
            title = f"Best score{equal} first of them" if equal else "Best score"
            figures = f"{self.score} {self.cell(first, self.score_key)}"
        elif speed:
            title = f"Fastest{equal} simplest of them" if equal else "Fastest"
            figures = f"{speed.value:,.0f} images/s ({speed.low:,.0f} to {speed.high:,.0f})"
            figures += f", {self.cell(first, WAITING)} of the time spent waiting for data"
            if self.ceiling:
                figures += f"; instant loading: {self.ceiling:,.0f} images/s"
        return ["", f"{title}: job {first.numbers}, {figures}. Use it by", f"  {first.command}"]

    def csv(self) -> str:
        """A row per job, with the full names of all keys, including the seed."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["job", *(key.lstrip("+") for key in self.keys), *self.metrics, "status", "error", "folder"])
        for job in self.jobs:
            settings = [job.values.get(key) for key in self.keys]
            metrics = [job.summary.get(key) for key in self.metrics]
            writer.writerow([job.number, *settings, *metrics, job.status, job.error, job.folder])
        return text.getvalue()

    def picture(self) -> bytes:
        """A PNG with a row per setting; free data are a dashed line."""
        about, keys = ("Best score", [self.score_key]) if self.is_about_score else ("Fastest", [SPEED, WAITING])
        title = f"{about}: {self.label(self.best[0].jobs)}" if self.best else "No job has a result yet"
        if len(self.best) > 1:
            one = "best mean" if self.is_about_score else "simplest"
            title += f", the {one} of {len(self.best)} that are equal within their ranges"
        shown = [setting for setting in self.settings if self.ceiling is None or not setting.is_free]
        bars = []
        for setting in shown or self.settings:
            measured = setting.spread_of(self.key)
            text = ", ".join(self.cell(setting, key) for key in keys) if measured else setting.status
            bars.append(Bar(self.label(setting.jobs), self.mark(setting), measured, text))
        if self.is_about_score:
            direction = "less" if self.sign < 0 else "more"
            return draw_scores(title, f"{self.score}, with its standard deviation ({direction} is better)", bars)
        return draw_bars(title, bars, self.ceiling)


def may_replace(sweep: Sweep) -> bool:
    """Whether the sweep's reports may be written: those of an earlier sweep stay until a job of this one is done."""
    return not (sweep.folder / NOTES / EARLIER).exists() or any(job.status == "done" for job in sweep.jobs)


def write_report(folder: Path) -> None:
    """Writes `sweep.csv`, `sweep.md`, `sweep.png` and `sweep.html` into the sweep's folder, each whole or not at all.

    Several jobs may do so at the same time, without a lock: each looks at the jobs again after writing, and writes
    again if they have changed, so that the last report that is written has every job.
    """
    written = ""
    while may_replace(sweep := Sweep(folder)) and sweep.csv() != written:
        written = sweep.csv()
        page = f"# Sweep {folder.name}\n\n```\n{sweep.text()}\n```\n\n![The result of each setting](sweep.png)\n"
        write_whole(folder / "sweep.csv", written)
        write_whole(folder / "sweep.md", page)
        picture = sweep.picture()
        write_whole(folder / "sweep.png", picture)
        write_page(folder / "sweep.html", PAGE, title=folder.name, sweep=sweep, picture=embedded(picture))
