"""What a sweep leaves behind: one table and one picture over all its jobs, and the setting to use.

The report is a pure function of the sweep's folder, so it can be made after every job, at the end, or after
an interruption. A job is a folder named by its number. It holds `.hydra/overrides.yaml`, and `summary.json`
when it ended well or `error.txt` when it failed; with neither, it was interrupted or is still running.

    python -m training.sweep multirun/2026-11-21_10-00-00      # make the report again, and print it
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from training.files import write_whole
from training.sweep_plot import as_number, draw_sweep, shorten

# What changes how fast a job runs, but not what it learns: `loader`, `loader.num_workers`, `device`, ...
SPEED_ONLY = ("loader", "device")


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


# A key of summary.json, its heading in a table, and how its value is written there.
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
    """One job of a sweep, as its folder tells it: `summary` if it is done, `error` if it failed."""

    number: int
    overrides: dict[str, str]  # the swept keys: those that differ between jobs
    constant: tuple[str, ...]  # the overrides that all jobs share, as they were given
    summary: dict[str, Any] | None = None
    error: str | None = None

    @property
    def status(self) -> str:
        """`done`, `failed`, or `unfinished`: interrupted or still running."""
        return "done" if self.summary is not None else "failed" if self.error is not None else "unfinished"

    @property
    def command(self) -> str:
        """The line to copy into a shell to run this job by itself."""
        swept = [f"{key}={value}" for key, value in self.overrides.items()]
        return shlex.join(["python", "train.py", *swept, *self.constant])

    @property
    def is_free(self) -> bool:
        """Whether it trained on cached batches: a ceiling to compare with, not a setting to use."""
        return self.summary is not None and self.summary.get("loader") == "cached"

    def metric(self, key: str) -> float | None:
        """The number under `key` in the summary; None where there is none."""
        value = (self.summary or {}).get(key)
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def read_jobs(folder: str | Path) -> list[Job]:
    """The jobs of the sweep in `folder`, by number. Raises ValueError when it holds none."""
    found = [path.parents[1] for path in Path(folder).glob("*/.hydra/overrides.yaml")]
    folders = sorted((path for path in found if path.name.isdecimal()), key=lambda path: int(path.name))
    if not folders:
        raise ValueError(
            f"{folder} is not a sweep's folder: it holds no job (such as 0/.hydra/overrides.yaml). "
            "Give one that `python train.py -m ...` made, such as multirun/2026-11-21_10-00-00."
        )
    given = [_read_overrides(path / ".hydra" / "overrides.yaml") for path in folders]
    keys = dict.fromkeys(key for overrides in given for key in overrides)
    swept = [key for key in keys if len({overrides.get(key) for overrides in given}) > 1]
    jobs = []
    for path, overrides in zip(folders, given, strict=True):
        differing = {key: overrides[key].partition("=")[2] for key in swept if key in overrides}
        constant = tuple(override for key, override in overrides.items() if key not in swept)
        jobs.append(Job(int(path.name), differing, constant, *_read_outcome(path)))
    return jobs


def _read_overrides(path: Path) -> dict[str, str]:
    """Each override under its key, as it was given: {"loader": "loader=torch"}."""
    try:
        overrides = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):  # cut short as it was written
        return {}
    overrides = overrides if isinstance(overrides, list) else []
    return {override.partition("=")[0]: override for override in map(str, overrides)}


def _read_outcome(job: Path) -> tuple[dict[str, Any] | None, str | None]:
    """(summary, error) of a job's folder."""
    if (job / "error.txt").exists():
        error = (job / "error.txt").read_text(encoding="utf-8", errors="replace")
        return None, " ".join(error.split()) or "its error.txt is empty"
    if not (job / "summary.json").exists():
        return None, None
    try:
        summary = json.loads((job / "summary.json").read_text(encoding="utf-8"))
    except ValueError as error:  # neither JSON nor UTF-8
        return None, f"its summary.json cannot be read: {error}"
    return (summary, None) if isinstance(summary, dict) else (None, "its summary.json holds no keys")


def write_report(folder: str | Path) -> list[Path]:
    """Write `sweep.csv`, `sweep.md` and `sweep.png` into the sweep's folder, and return their paths.

    Each is written whole or not at all. Without matplotlib there is no picture, and `sweep.md` says so.
    Raises ValueError when the folder is no sweep's, OSError when it cannot be written.
    """
    jobs, (table, page, picture) = read_jobs(folder), _paths(folder)
    image = _draw(jobs)
    write_whole(table, _format_csv(jobs))
    write_whole(page, _format_markdown(Path(folder), jobs, image is not None))
    if image is None:
        picture.unlink(missing_ok=True)  # an earlier one would not show what the table says
        return [table, page]
    write_whole(picture, image)
    return [table, page, picture]


def format_report(folder: str | Path) -> str:
    """The report for a terminal: table, best setting with the line to copy, failed jobs, the files written.

    Raises ValueError when the folder is no sweep's.
    """
    jobs = read_jobs(folder)
    best = _highest(jobs, "images_per_second")
    columns = [["  ", *("> " if job is best else "  " for job in jobs)]]
    for heading, cells, is_number in _table(jobs):
        cells = [shorten(cell, 32) for cell in [heading, *cells]]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if is_number else cell.ljust(width) for cell in cells])
    lines = [f"Sweep {folder}", _headline(jobs), ""]
    lines += [mark + "  ".join(cells).rstrip() for mark, *cells in zip(*columns, strict=True)]
    for sentence, command in _recommendations(jobs):
        lines += ["", sentence, f"  {command}"]
    if problems := _problems(jobs):
        lines += ["", *problems]
    written = [str(path) for path in _paths(folder) if path.exists()]
    return "\n".join(lines + (["", "Written: " + ", ".join(written)] if written else []))


def _format_markdown(folder: Path, jobs: Sequence[Job], has_picture: bool) -> str:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    best = _highest(jobs, "images_per_second")
    headings, columns, is_number = zip(*_table(jobs), strict=True)
    lines = [f"# Sweep {folder.resolve().name}", "", _headline(jobs), ""]
    lines += [row(headings), row(["---:" if right else "---" for right in is_number])]
    for job, *cells in zip(jobs, *columns, strict=True):
        cells = [cell.replace("|", "\\|") for cell in cells]
        lines.append(row([f"**{cell}**" if job is best else cell for cell in cells]))
    for sentence, command in _recommendations(jobs):
        lines += ["", sentence, "", "```bash", command, "```"]
    if problems := _problems(jobs):
        lines += ["", *(f"- {problem}" for problem in problems)]
    picture = "![Images per second and share of waiting, by setting](sweep.png)"
    missing = "There is no picture, because matplotlib is not installed (`pip install matplotlib`)."
    return "\n".join([*lines, "", picture if has_picture else missing, ""])


def _format_csv(jobs: Sequence[Job]) -> str:
    keys, metrics = _swept_keys(jobs), [key for key, _, _ in METRICS]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *(key.lstrip("+") for key in keys), *metrics, "status", "error"])
    for job in jobs:
        settings = [job.overrides.get(key) for key in keys]
        writer.writerow([job.number, *settings, *map(job.metric, metrics), job.status, job.error])
    return text.getvalue()


def _headline(jobs: Sequence[Job]) -> str:
    counts = Counter(job.status for job in jobs)
    statuses = [status for status in ("done", "failed", "unfinished") if counts[status]]
    text = "Jobs: " + ", ".join(f"{counts[status]} {status}" for status in statuses)
    return f"{text}; all with {' '.join(jobs[0].constant)}" if jobs[0].constant else text


def _table(jobs: Sequence[Job]) -> list[tuple[str, list[str], bool]]:
    """Columns of (heading, cells, whether they are numbers), only for what varies and what is known."""
    columns = [("job", [str(job.number) for job in jobs], True)]
    for key, name in _short_names(jobs).items():
        cells = [job.overrides.get(key, "-") for job in jobs]
        columns.append((name, cells, all(as_number(cell) is not None for cell in cells)))
    for key, heading, write in METRICS:
        cells = ["-" if (value := job.metric(key)) is None else write(value) for job in jobs]
        if any(cell != "-" for cell in cells):
            columns.append((heading, cells, True))
    if any(job.status != "done" for job in jobs):
        columns.append(("status", [job.status for job in jobs], False))
    return columns


def _recommendations(jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """(sentence, command): the fastest job, and the most accurate where the sweep can change accuracy."""
    fastest, accurate = _highest(jobs, "images_per_second"), _highest(jobs, "test_accuracy")
    found = []
    if fastest is not None:
        sentence = f"Fastest: job {fastest.number}, {fastest.metric('images_per_second'):,.0f} images/s"
        if (waiting := fastest.metric("data_wait_fraction")) is not None:
            sentence += f", {percent(waiting)} of the time spent waiting for data"
        if ceiling := _ceiling(jobs):
            share = 100 * fastest.metric("images_per_second") / ceiling
            sentence += f" ({share:.0f} % of what a free loader would give)"
        found.append((f"{sentence}.", fastest.command))
    if accurate is not None and accurate is not fastest and not _is_speed_only(jobs):
        accuracy = accurate.metric("test_accuracy")
        sentence = f"Most accurate: job {accurate.number}, test accuracy {accuracy:.4f}."
        found.append((sentence, accurate.command))
    return found


def _problems(jobs: Sequence[Job]) -> list[str]:
    reasons = {"failed": "{}", "unfinished": "it was interrupted, or is still running"}
    return [
        f"{job.status.capitalize()}: {_label(job, jobs)}: {reasons[job.status].format(job.error)}"
        for job in jobs
        if job.status in reasons
    ]


def _highest(jobs: Sequence[Job], key: str) -> Job | None:
    candidates = [job for job in jobs if job.metric(key) is not None and not job.is_free]
    ranks = (key, "images_per_second")  # of two jobs as accurate, the faster
    return max(candidates, key=lambda job: [job.metric(rank) or 0.0 for rank in ranks], default=None)


def _ceiling(jobs: Sequence[Job]) -> float | None:
    """Images/s if data were free: a cached job's, where all jobs train the same."""
    speeds = [job.metric("images_per_second") or 0.0 for job in jobs if job.is_free]
    return max(speeds, default=None) if _is_speed_only(jobs) else None


def _is_speed_only(jobs: Sequence[Job]) -> bool:
    return all(key.split(".")[0] in SPEED_ONLY for key in _swept_keys(jobs))


def _swept_keys(jobs: Sequence[Job]) -> list[str]:
    return list(dict.fromkeys(key for job in jobs for key in job.overrides))


def _short_names(jobs: Sequence[Job]) -> dict[str, str]:
    """A name for each swept key: its last part, unless two keys share it."""
    keys = _swept_keys(jobs)
    last = {key: key.lstrip("+").rpartition(".")[2] for key in keys}
    shared = Counter(last.values())
    return {key: last[key] if shared[last[key]] == 1 else key.lstrip("+") for key in keys}


def _label(job: Job, jobs: Sequence[Job]) -> str:
    names = _short_names(jobs)
    setting = " ".join(f"{names[key]}={value}" for key, value in job.overrides.items())
    return f"job {job.number} ({setting})" if setting else f"job {job.number}"


def _paths(folder: str | Path) -> tuple[Path, Path, Path]:
    return Path(folder, "sweep.csv"), Path(folder, "sweep.md"), Path(folder, "sweep.png")


def _draw(jobs: Sequence[Job]) -> bytes | None:
    """The picture as a PNG, None without matplotlib. Cached jobs that set the ceiling have no bar."""
    ceiling, names = _ceiling(jobs), _short_names(jobs)
    drawn = [job for job in jobs if ceiling is None or not job.is_free] or jobs
    settings = [{name: job.overrides.get(key, "-") for key, name in names.items()} for job in drawn]
    if len({tuple(setting.values()) for setting in settings}) < len(settings) or not names:
        settings = [{"job": str(job.number)} | setting for job, setting in zip(drawn, settings, strict=True)]

    def values(key: str) -> list[float | str]:
        words = {"done": "not measured", "failed": "failed", "unfinished": "unfinished"}
        return [words[job.status] if (value := job.metric(key)) is None else value for job in drawn]

    fastest = _highest(jobs, "images_per_second")
    title = "No job has measured its speed" if fastest is None else f"Fastest: {_label(fastest, jobs)}"
    try:
        return draw_sweep(settings, values("images_per_second"), values("data_wait_fraction"), title, ceiling)
    except ImportError:
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the report of a sweep again, and print it.")
    parser.add_argument("folder", type=Path, help="the sweep's folder, such as multirun/2026-11-21_10-00-00")
    folder = parser.parse_args(arguments).folder
    try:
        write_report(folder)
        print(format_report(folder))
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
