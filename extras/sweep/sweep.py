"""The report of a sweep: a table and a picture of all its settings, and which setting to use.

Jobs that differ only in `seed` repeat one setting; the table has their medians. Settings whose values overlap count as
equal, and the report recommends the simplest of them.

The report is a pure function of the sweep's folder, so any process on any machine can write it: after every job, at
the end, or after an interruption. Each job has a folder, named by its number, with `.hydra/overrides.yaml`, and with
`summary.json` if the job is done or `error.txt` if it failed. With neither, the job was interrupted or is running.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import shlex
import statistics
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.experimental.callback import Callback
from hydra.types import RunMode

from training.files import write_whole
from training.launch import SweepStart
from training.sweeps.picture import Bar, Figure, draw_bars
from training.table import table

log = logging.getLogger(__name__)

SIMPLEST = ("torch", "threads", "workers", "prefetch", "resident")  # the loaders, the simplest first
STATUSES = ("done", "failed", "unfinished")
SPEED, WAITING = "images_per_second", "data_wait_fraction"
SPEED_ONLY = {"loader", "device", "timing", "logger"}  # sections that do not change what a job learns
METRICS = {  # keys of summary.json, their headings in the table, and how their values are written there
    SPEED: ("images/s", "{:,.0f}"),
    WAITING: ("waiting", "{:.1%}"),
    "first_batch_seconds": ("1st batch", "{:.2f} s"),
    "step_ms_p50": ("step p50", "{:.1f} ms"),
    "step_ms_p95": ("step p95", "{:.1f} ms"),
}


class Job(NamedTuple):
    """One job of a sweep, as read from its folder."""

    number: int
    overrides: list[str]  # as given on the command line: loader=torch
    status: str  # one of STATUSES
    summary: dict[str, Any]  # content of summary.json; empty if the job is not done
    error: str = ""  # why it is not done


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
        """The median over the repeats, or for a score of the test set the mean, with the lowest and highest value.

        The speed of a single job has the quartiles of its windows instead. None without a number.
        """
        values = [job.summary[key] for job in self.jobs if job.summary.get(key) is not None]
        if not values:
            return None
        average = statistics.mean if key.startswith("test_") else statistics.median
        quartiles = self.summary.get(f"{key}_quartiles") if len(self.jobs) == 1 else None
        spread = [*values, *(quartiles or [])]
        return Figure(average(values), min(spread), max(spread))

    def complexity(self) -> tuple[float, ...]:
        """A sort key, the smallest for the simplest setting: its loader, workers, number of overrides, first job."""
        loader, workers = self.summary.get("loader"), self.summary.get("num_workers") or 0
        return (*SIMPLEST, loader).index(loader), workers, len(self.overrides), self.jobs[0].number


def without_seed(job: Job) -> list[str]:
    return [text for text in job.overrides if text.partition("=")[0] != "seed"]


def values_of(overrides: list[str]) -> dict[str, str]:
    return {key: value for key, _, value in (override.partition("=") for override in overrides)}


def read_job(folder: Path) -> Job:
    """Reads a job from its folder."""
    overrides, number = [], int(folder.name)
    with suppress(yaml.YAMLError):  # the job is just being started
        overrides = [str(text) for text in yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()) or []]
    if (folder / "error.txt").exists():
        return Job(number, overrides, "failed", {}, " ".join((folder / "error.txt").read_text().split()))
    if (folder / "summary.json").exists():
        return Job(number, overrides, "done", json.loads((folder / "summary.json").read_text()))
    return Job(number, overrides, "unfinished", {}, "it was interrupted, or is still running")


class Sweep:
    """The jobs in a sweep's folder, and what they show. Raises ValueError if the folder has no jobs."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        found = [path.parents[1] for path in self.folder.glob("[0-9]*/.hydra/overrides.yaml")]
        self.jobs = [read_job(path) for path in sorted(found, key=lambda path: int(path.name))]
        if not self.jobs:
            raise ValueError(f"{folder} has no job of a sweep, such as 0/.hydra/overrides.yaml")
        groups: dict[tuple[str, ...], list[Job]] = {}
        for job in self.jobs:
            groups.setdefault(tuple(without_seed(job)), []).append(job)
        self.settings = [Setting(jobs) for jobs in groups.values()]
        given = dict.fromkeys(override for job in self.jobs for override in job.overrides)
        self.constant = [text for text in given if all(text in job.overrides for job in self.jobs)]
        self.keys = list(dict.fromkeys(text.partition("=")[0] for text in given if text not in self.constant))
        keys = [key for key in self.keys if key != "seed"]
        last = {key: key.rpartition(".")[2] for key in keys}  # is enough if it is not that of another key too
        self.names = last if len(set(last.values())) == len(keys) else dict(zip(keys, keys, strict=True))
        done = next((job.summary for job in self.jobs if job.summary), {})
        self.score = str(done.get("score", "test_accuracy"))  # the key in summary.json of a job's score
        self.sign = -1 if done.get("lower_is_better") else 1
        self.fastest = self.best(SPEED)
        # The images/s with free data, which are comparable if nothing but the loader differs between jobs.
        self.sections = {key.lstrip("+").partition(".")[0] for key in keys}
        free = [one.figure(SPEED) for one in self.settings if one.is_free and self.sections <= {"loader"}]
        self.ceiling: float | None = max([figure.value for figure in free if figure], default=None)

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
        return "\n".join(
            [f"Sweep {self.folder}", headline, "", *self._table(), *self._advice(), "", *not_done]
        ).rstrip()

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
                columns.append(["spread", *((figure and figure.half_spread("±{:,.0f}")) or "-" for figure in figures)])
        columns.append([self.score.removeprefix("test_"), *map(self._score, settings)])
        columns = [column for column in columns if set(column[1:]) != {"-"}]
        if any(job.status != "done" for job in self.jobs):
            columns.append(["status", *(setting.status for setting in settings)])
        marks = [" ", *map(self.mark, settings)]
        return [f"{mark} {line}".rstrip() for mark, line in zip(marks, table(columns), strict=True)]

    def _score(self, setting: Setting) -> str:
        figure = setting.figure(self.score)
        return f"{figure.value:.4f}{figure.half_spread(' ±{:.4f}')}" if figure else "-"

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
        accurate = self.best(self.score, self.sign)
        is_other = not any(setting in accurate for setting in self.fastest[:1])
        if accurate and is_other and not self.sections <= SPEED_ONLY:
            found = f"{self.score.replace('_', ' ')} {self._score(accurate[0])}"
            lines += self._named("Most accurate", accurate, found)
        return lines

    def _named(self, best: str, equals: list[Setting], found: str) -> list[str]:
        simplest = equals[0]
        if len(equals) > 1:
            labels = "; ".join(self.label(setting.jobs) for setting in equals)
            best = f"{best}, and equal within their spread: {labels}.\nThe simplest of them"
        jobs = f"{'job' if len(simplest.jobs) == 1 else 'jobs'} {simplest.numbers}"
        return ["", f"{best}: {jobs}, {found}.", f"  {simplest.command}"]

    def csv(self) -> str:
        """A row per job, with the full names of all keys, including the seed."""
        text, metrics = io.StringIO(), [*METRICS, self.score]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["job", *(key.lstrip("+") for key in self.keys), *metrics, "status", "error"])
        for job in self.jobs:
            values = map(values_of(job.overrides).get, self.keys)
            writer.writerow([job.number, *values, *map(job.summary.get, metrics), job.status, job.error])
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


def write_report(folder: str | Path) -> list[Path]:
    """Writes `sweep.csv`, `sweep.md` and `sweep.png` into the sweep's folder, each whole or not at all.

    Several processes may write at the same time, without a lock. Each reads the jobs again after writing, and writes
    again if they have changed, so the last report that is written has every job.

    Returns the paths of the files. Raises ValueError if the folder is not a sweep's, OSError if it is not writable.
    """
    sweep, written = Sweep(folder), ""
    paths = [sweep.folder / name for name in ("sweep.csv", "sweep.md", "sweep.png")]
    while sweep.csv() != written:
        written = sweep.csv()
        heading, picture = f"# Sweep {sweep.folder.resolve().name}", "![Speed and waiting of each setting](sweep.png)"
        page = f"{heading}\n\n```\n{sweep.text()}\n```\n\n{picture}\n"
        contents: list[str | bytes] = [written, page, sweep.picture()]
        for path, content in zip(paths, contents, strict=True):
            write_whole(path, content)
        sweep = Sweep(folder)
    return paths


def print_sweep(folder: str | Path) -> None:
    """Writes a sweep's report and prints it. Raises ValueError as write_report does."""
    write_report(folder)
    print(Sweep(folder).text())


class SweepTable(Callback):
    """Hydra's callback: writes the report after each job, and prints it at the end of the sweep."""

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        SweepStart.at_end.append(print_sweep)

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            try:
                write_report(Path(config.hydra.runtime.output_dir).parent)
            except Exception as error:  # the other jobs matter more than the report
                log.warning("the sweep's report could not be written: %s", error)
