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
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.experimental.callback import Callback
from hydra.types import RunMode

from training.files import write_whole
from training.launch import SweepStart
from training.sweeps.picture import Figure, draw_bars
from training.table import table

log = logging.getLogger(__name__)

SIMPLEST = ("torch", "threads", "workers", "prefetch", "resident")  # the loaders, the simplest first
# The words for a setting without a number, by its status.
WORDS = {"done": "not measured", "failed": "failed", "unfinished": "unfinished"}
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
    status: str  # a key of WORDS
    summary: dict[str, Any]  # content of summary.json; empty if the job is not done
    error: str = ""  # why it is not done

    def metric(self, key: str) -> float | None:
        """The number under `key` in the summary; None if it is missing or not finite."""
        value = self.summary.get(key)
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None


class Setting:
    """One or more jobs whose overrides are the same, except for the seed."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs, statuses = jobs, [job.status for job in jobs]
        self.overrides = without_seed(jobs[0]) if len(jobs) > 1 else jobs[0].overrides
        self.command = shlex.join(["python", "train.py", *self.overrides])
        self.numbers = ", ".join(str(job.number) for job in jobs)
        self.status = statuses[0] if len(set(statuses)) == 1 else f"{statuses.count('done')} of {len(jobs)} done"
        self.summary: dict[str, Any] = next((job.summary for job in jobs if job.summary), {})
        self.is_free = self.summary.get("loader") == "cached"  # its speed is an upper limit, and not a result

    def figure(self, key: str) -> Figure | None:
        """The median over the repeats, or for a score of the test set the mean, with the lowest and highest value.

        The speed of a single job has the quartiles of its windows instead. None without a number.
        """
        values = [value for job in self.jobs if (value := job.metric(key)) is not None]
        if not values:
            return None
        average = statistics.mean if key.startswith("test_") else statistics.median
        quartiles = self.summary.get(f"{key}_quartiles") if len(self.jobs) == 1 else None
        spread = [*values, *(quartiles or [])]
        return Figure(average(values), min(spread), max(spread))

    def complexity(self) -> tuple[float, ...]:
        """A sort key, the smallest for the simplest setting: its loader, workers, number of overrides, first job."""
        loader, workers = self.summary.get("loader"), self.summary.get("num_workers") or 0
        rank = SIMPLEST.index(loader) if loader in SIMPLEST else len(SIMPLEST)
        return rank, workers, len(self.overrides), self.jobs[0].number


def without_seed(job: Job) -> list[str]:
    return [text for text in job.overrides if text.partition("=")[0] != "seed"]


def read_job(folder: Path) -> Job:
    """Reads a job from its folder. Files that are missing or damaged make it unfinished or failed."""
    overrides, number = [], int(folder.name)
    with suppress(yaml.YAMLError):  # the job is just being started
        overrides = [str(text) for text in yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()) or []]
    if (folder / "error.txt").exists():
        error = " ".join((folder / "error.txt").read_text(errors="replace").split())
        return Job(number, overrides, "failed", {}, error or "its error.txt is empty")
    try:
        return Job(number, overrides, "done", dict(json.loads((folder / "summary.json").read_text())))
    except FileNotFoundError:
        return Job(number, overrides, "unfinished", {}, "it was interrupted, or is still running")
    except (ValueError, TypeError, OSError) as error:
        return Job(number, overrides, "failed", {}, f"its summary.json cannot be read: {error}")


class Sweep:
    """The jobs in a sweep's folder, and what they show. Raises ValueError if the folder has no jobs."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        found = [path.parents[1] for path in self.folder.glob("*/.hydra/overrides.yaml")]
        found = sorted((path for path in found if path.name.isdecimal()), key=lambda path: int(path.name))
        self.jobs = [read_job(path) for path in found]
        if not self.jobs:
            raise ValueError(
                f"{folder} is not a sweep's folder: it has no job (such as 0/.hydra/overrides.yaml). "
                "Give one that `python train.py -m ...` made, such as multirun/2026-11-21_10-00-00_123456."
            )
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
        self.fastest, self.as_fast = self._best(SPEED)
        # The images/s with free data, which are comparable if nothing but the loader differs between jobs.
        self.sections = {key.lstrip("+").partition(".")[0] for key in keys}
        free = [one.figure(SPEED) for one in self.settings if one.is_free and self.sections <= {"loader"}]
        self.ceiling: float | None = max([figure.value for figure in free if figure], default=None)

    def _best(self, key: str, sign: int = 1) -> tuple[Setting | None, list[Setting]]:
        """The simplest of the settings that are best in `key`, and all of those: the best one and its equals."""
        given = [(one, figure) for one in self.settings if not one.is_free and (figure := one.figure(key))]
        if not given:
            return None, []
        best = max((figure for _, figure in given), key=lambda figure: sign * figure.value)
        equals = [setting for setting, figure in given if figure.overlaps(best)]
        return min(equals, key=Setting.complexity), equals

    def label(self, setting: Setting) -> str:
        """The values of the keys that vary, such as "job 2 (loader=torch num_workers=2)"."""
        given = values_of(setting.overrides)
        overrides = " ".join(f"{name}={given[key]}" for key, name in self.names.items() if key in given)
        name = f"{len(setting.jobs)} runs" if len(setting.jobs) > 1 else f"job {setting.numbers}"
        return f"{name} ({overrides})" if overrides else name

    def text(self) -> str:
        """The report for a terminal: the table, the best setting with its command, and the jobs that are not done."""
        counts = Counter(job.status for job in self.jobs)
        headline = "Jobs: " + ", ".join(f"{counts[status]} {status}" for status in WORDS if counts[status])
        headline += f"; all with {' '.join(self.constant)}" if self.constant else ""
        lines = [f"Sweep {self.folder}", headline, "", *self._table()]
        for sentence, setting in self._advice():
            lines += ["", sentence, f"  {setting.command}"]
        failed = [job for job in self.jobs if job.error]
        not_done = [f"{job.status.capitalize()}: {self.label(Setting([job]))}: {job.error}" for job in failed]
        return "\n".join([*lines, "", *not_done]).rstrip()

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
        best = [">" if setting is self.fastest else "=" if setting in self.as_fast else " " for setting in settings]
        return [f"{mark} {line}".rstrip() for mark, line in zip([" ", *best], table(columns), strict=True)]

    def _advice(self) -> Iterator[tuple[str, Setting]]:
        """Sentences on the fastest setting, and on the most accurate one if it is another."""
        best, equals = self.fastest, self.as_fast
        if best is not None and (speed := best.figure(SPEED)):
            sentence = f"{self._named('Fastest', best, equals)}, {speed.value:,.0f} images/s"
            if waiting := best.figure(WAITING):
                sentence += f", {waiting.value:.1%} of the time spent waiting for data"
            if self.ceiling:
                sentence += f" ({speed.value / self.ceiling:.0%} of the speed with free data)"
            yield f"{sentence}.", best
        setting, equals = self._best(self.score, self.sign)
        if setting is not None and self.fastest not in equals and not self.sections <= SPEED_ONLY:
            score = f"{self.score.replace('_', ' ')} {self._score(setting)}"
            yield f"{self._named('Most accurate', setting, equals)}, {score}.", setting

    def _score(self, setting: Setting) -> str:
        figure = setting.figure(self.score)
        return f"{figure.value:.4f}{figure.half_spread(' ±{:.4f}')}" if figure else "-"

    def _named(self, best: str, setting: Setting, equals: list[Setting]) -> str:
        jobs = f"{'job' if len(setting.jobs) == 1 else 'jobs'} {setting.numbers}"
        if len(equals) == 1:
            return f"{best}: {jobs}"
        labels = "; ".join(map(self.label, equals))
        return f"{best}, and equal within their spread: {labels}.\nThe simplest of them: {jobs}"

    def csv(self) -> str:
        """A row per job, with the full names of all keys, including the seed."""
        text, metrics = io.StringIO(), [*METRICS, self.score]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["job", *(key.lstrip("+") for key in self.keys), *metrics, "status", "error"])
        for job in self.jobs:
            values = map(values_of(job.overrides).get, self.keys)
            writer.writerow([job.number, *values, *map(job.metric, metrics), job.status, job.error])
        return text.getvalue()

    def picture(self) -> bytes:
        """A PNG with a bar per setting; free data are a dashed line."""
        shown = [one for one in self.settings if self.ceiling is None or not one.is_free] or self.settings
        title = "No job measured its speed" if self.fastest is None else f"Fastest: {self.label(self.fastest)}"
        if self.fastest is not None and len(self.as_fast) > 1:
            title = f"{len(self.as_fast)} are equally fast; the simplest is {self.label(self.fastest)}"
        marks = ["best" if one is self.fastest else "equal" if one in self.as_fast else "" for one in shown]
        speeds, waiting = (
            [setting.figure(key) or WORDS.get(setting.status, setting.status) for setting in shown]
            for key in (SPEED, WAITING)
        )
        return draw_bars(title, list(map(self.label, shown)), speeds, waiting, marks, self.ceiling)


def values_of(overrides: list[str]) -> dict[str, str]:
    return {key: value for key, _, value in (override.partition("=") for override in overrides)}


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
