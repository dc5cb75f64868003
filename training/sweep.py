"""What a sweep leaves behind: one table and one picture over all its jobs, and the setting to use.

The report is a pure function of the sweep's folder, so any process on any machine can write it: after every job, at
the end, or after an interruption. Each job has a folder, named by its number. The folder has `.hydra/overrides.yaml`,
and `summary.json` if the job is done or `error.txt` if it failed. With neither, the job was interrupted or is running.

    python -m training.sweep multirun/2026-11-21_10-00-00_123456      # write the report again, and print it
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from training.files import write_whole
from training.sweep_plot import draw_sweep, percent
from training.table import table

# What the picture shows for a job that has no number, by the job's status.
WORDS = {"done": "not measured", "failed": "failed", "unfinished": "unfinished"}
# Keys that change how fast a job runs but not what it learns: `loader`, `loader.num_workers`, `device`, ...
SPEED_ONLY = ("loader", "device")
# Keys of summary.json, their headings in the table, and how their values are written there.
METRICS = (
    ("images_per_second", "images/s", "{:,.0f}".format),
    ("data_wait_fraction", "waiting", percent),
    ("first_batch_seconds", "1st batch", "{:.2f} s".format),
    ("step_ms_p50", "step p50", "{:.1f} ms".format),
    ("step_ms_p95", "step p95", "{:.1f} ms".format),
    ("test_accuracy", "accuracy", "{:.4f}".format),
)


@dataclass(frozen=True)
class Job:
    """One job of a sweep, as read from its folder."""

    number: int
    overrides: list[str]  # as given on the command line: loader=torch
    status: str  # done, failed, or unfinished: interrupted or still running
    summary: dict[str, Any]  # empty unless it is done
    error: str = ""

    @property
    def command(self) -> str:
        """The line to copy into a shell to run this job alone."""
        return shlex.join(["python", "train.py", *self.overrides])

    @property
    def is_free(self) -> bool:
        """Whether it trained on cached batches: its speed is an upper limit, and its loader not one to use."""
        return self.summary.get("loader") == "cached"

    def metric(self, key: str) -> float | None:
        """The number under `key` in the summary, or None if there is no finite one."""
        value = self.summary.get(key)
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def read_job(folder: Path) -> Job:
    try:
        overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):  # only a part of it was written
        overrides = None
    job = partial(Job, int(folder.name), [str(override) for override in overrides or []])
    if (folder / "error.txt").exists():
        error = (folder / "error.txt").read_text(encoding="utf-8", errors="replace")
        return job("failed", {}, " ".join(error.split()) or "its error.txt is empty")
    try:
        return job("done", dict(json.loads((folder / "summary.json").read_text(encoding="utf-8"))))
    except FileNotFoundError:
        return job("unfinished", {}, "it was interrupted, or is still running")
    except (ValueError, TypeError) as error:
        return job("failed", {}, f"its summary.json cannot be read: {error}")


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """For each key its last part, or all of it if another key ends in the same part."""
    last = {key: key.lstrip("+").rpartition(".")[2] for key in keys}
    shared = Counter(last.values())
    return {key: part if shared[part] == 1 else key.lstrip("+") for key, part in last.items()}


class Sweep:
    """The jobs in a sweep's folder, by number, and what they show. Raises ValueError if there are none."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        found = [path.parents[1] for path in self.folder.glob("*/.hydra/overrides.yaml")]
        found = sorted((path for path in found if path.name.isdecimal()), key=lambda path: int(path.name))
        if not found:
            raise ValueError(
                f"{folder} is not a sweep's folder: it has no job (such as 0/.hydra/overrides.yaml). "
                "Give one that `python train.py -m ...` made, such as multirun/2026-11-21_10-00-00_123456."
            )
        self.jobs = [read_job(path) for path in found]
        given = [override for job in self.jobs for override in job.overrides]
        self.constant = [text for text in dict.fromkeys(given) if all(text in job.overrides for job in self.jobs)]
        keys = dict.fromkeys(text.partition("=")[0] for text in given if text not in self.constant)
        self.names = short_names(keys)
        self.trains_alike = all(key.split(".")[0] in SPEED_ONLY for key in keys)
        comparable = all(key.split(".")[0] == "loader" for key in keys)  # another device has another ceiling
        free = [job.metric("images_per_second") or 0.0 for job in self.jobs if job.is_free and comparable]
        self.ceiling: float | None = max(free, default=None)  # images/s with free data
        self.fastest = self._highest("images_per_second")
        # No loader can be faster than free data. If one was, the machine was busier in some jobs than in others.
        fastest = (self.fastest and self.fastest.metric("images_per_second")) or 0.0
        self.is_unequal = self.ceiling is not None and fastest > 1.05 * self.ceiling
        if self.is_unequal:
            self.ceiling = None

    def _highest(self, key: str) -> Job | None:
        candidates = [job for job in self.jobs if job.metric(key) is not None and not job.is_free]
        ranks = (key, "images_per_second")  # of two equally accurate jobs, the faster one
        return max(candidates, key=lambda job: [job.metric(rank) or 0.0 for rank in ranks], default=None)

    def settings(self, job: Job) -> dict[str, str]:
        """The job's values of the swept keys, under the keys' short names."""
        given = (override.partition("=") for override in job.overrides)
        return {self.names[key]: value for key, _, value in given if key in self.names}

    def label(self, job: Job) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.settings(job).items())
        return f"job {job.number} ({settings})" if settings else f"job {job.number}"

    def text(self) -> str:
        """The report for a terminal: the table, the best setting with the line to copy, the jobs that are not done."""
        counts = Counter(job.status for job in self.jobs)
        headline = "Jobs: " + ", ".join(f"{counts[status]} {status}" for status in WORDS if counts[status])
        headline += f"; all with {' '.join(self.constant)}" if self.constant else ""
        lines = [f"Sweep {self.folder}", headline, "", *self._table()]
        for sentence, job in self._advice():
            lines += ["", sentence, f"  {job.command}"]
        not_done = [f"{job.status.capitalize()}: {self.label(job)}: {job.error}" for job in self.jobs if job.error]
        return "\n".join([*lines, "", *not_done]).rstrip()

    def _table(self) -> list[str]:
        """One line per job, with columns only for keys that vary and metrics that are known."""
        columns = [["job", *(str(job.number) for job in self.jobs)]]
        columns += [[name, *(self.settings(job).get(name, "-") for job in self.jobs)] for name in self.names.values()]
        for key, heading, write in METRICS:
            values = [job.metric(key) for job in self.jobs]
            if any(value is not None for value in values):
                columns.append([heading, *("-" if value is None else write(value) for value in values)])
        if any(job.status != "done" for job in self.jobs):
            columns.append(["status", *(job.status for job in self.jobs)])
        marks = ["  ", *("> " if job is self.fastest else "  " for job in self.jobs)]
        return [mark + line for mark, line in zip(marks, table(columns), strict=True)]

    def _advice(self) -> Iterator[tuple[str, Job]]:
        """A sentence about the fastest job, and one about the most accurate if the sweep can change accuracy."""
        if job := self.fastest:
            speed, waiting = job.metric("images_per_second") or 0.0, job.metric("data_wait_fraction")
            sentence = f"Fastest: job {job.number}, {speed:,.0f} images/s"
            if waiting is not None:
                sentence += f", {percent(waiting)} of the time spent waiting for data"
            if self.ceiling:
                sentence += f" ({100 * speed / self.ceiling:.0f} % of the speed with free data)"
            if self.is_unequal:
                sentence += ". It cannot be faster than loader=cached: the machine was busy, measure again"
            yield f"{sentence}.", job
        job = None if self.trains_alike else self._highest("test_accuracy")
        if job is not None and job is not self.fastest:
            yield f"Most accurate: job {job.number}, test accuracy {job.metric('test_accuracy'):.4f}.", job

    def markdown(self) -> str:
        heading, picture = f"# Sweep {self.folder.resolve().name}", "![Speed and waiting of each setting](sweep.png)"
        return f"{heading}\n\n```\n{self.text()}\n```\n\n{picture}\n"

    def csv(self) -> str:
        """One row per job, with the full names of the keys."""
        text, metrics = io.StringIO(), [key for key, _, _ in METRICS]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["job", *(key.lstrip("+") for key in self.names), *metrics, "status", "error"])
        for job in self.jobs:
            settings = map(self.settings(job).get, self.names.values())
            writer.writerow([job.number, *settings, *map(job.metric, metrics), job.status, job.error])
        return text.getvalue()

    def picture(self) -> bytes:
        """One bar per job, in the table's order. Jobs with free data are a dashed line instead."""
        jobs = [job for job in self.jobs if self.ceiling is None or not job.is_free] or self.jobs
        speeds, waiting = (
            [WORDS[job.status] if (value := job.metric(key)) is None else value for job in jobs]
            for key in ("images_per_second", "data_wait_fraction")
        )
        best = jobs.index(self.fastest) if self.fastest else None
        return draw_sweep([self.label(job) for job in jobs], speeds, waiting, best, self.ceiling)


def write_report(folder: str | Path) -> list[Path]:
    """Writes `sweep.csv`, `sweep.md` and `sweep.png` into the sweep's folder, each whole or not at all.

    Several processes may do so at once, without a lock: each reads the jobs again after it has written, and repeats
    that if they have changed, so the last one to write has written every job.

    Returns their paths. Raises ValueError if it is not a sweep's folder, OSError if it cannot be written to.
    """
    sweep, written = Sweep(folder), ""
    while sweep.csv() != written:
        written = sweep.csv()
        write_whole(sweep.folder / "sweep.csv", written)
        write_whole(sweep.folder / "sweep.md", sweep.markdown())
        write_whole(sweep.folder / "sweep.png", sweep.picture())
        sweep = Sweep(folder)
    return [sweep.folder / name for name in ("sweep.csv", "sweep.md", "sweep.png")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the report of a sweep again, and print it.")
    parser.add_argument("folder", help="the sweep's folder, such as multirun/2026-11-21_10-00-00_123456")
    folder = parser.parse_args(arguments).folder
    try:
        write_report(folder)
        print(Sweep(folder).text())
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
