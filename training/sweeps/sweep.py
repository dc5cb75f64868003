"""The report of a sweep: a table and a picture of all its settings, and which setting to use.

Jobs that differ only in `seed` repeat one setting; the table has their medians. Settings whose values overlap
(training/sweeps/jobs.py) count as equal, and the report recommends the simplest of them.

The report is a pure function of the sweep's folder, so any process on any machine can write it: after every job, at
the end, or after an interruption. Each job has a folder, named by its number, with `.hydra/overrides.yaml`, and with
`summary.json` if the job is done or `error.txt` if it failed. With neither, the job was interrupted or is running.

    python -m training.sweeps.sweep multirun/2026-11-21_10-00-00_123456      # writes the report again, and prints it
"""

from __future__ import annotations

import argparse
import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from training.files import write_whole
from training.sweeps.jobs import Figure, Setting, read_job, settings_of
from training.sweeps.plot import draw_bars
from training.table import table

# The words in the picture for a setting without a number, by its status.
WORDS = {"done": "not measured", "failed": "failed", "unfinished": "unfinished"}
SPEED, WAITING = "images_per_second", "data_wait_fraction"
# Sections that change how fast a job runs, but not what it learns.
SPEED_ONLY = ("loader", "device", "timing", "logger")
# Keys of summary.json, their headings in the table, and how their values are written there.
METRICS = {
    SPEED: ("images/s", "{:,.0f}"),
    WAITING: ("waiting", "{:.1%}"),
    "first_batch_seconds": ("1st batch", "{:.2f} s"),
    "step_ms_p50": ("step p50", "{:.1f} ms"),
    "step_ms_p95": ("step p95", "{:.1f} ms"),
}


class Sweep:
    """The jobs in a sweep's folder, and what they show. Raises ValueError if the folder has no jobs."""

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
        self.settings = settings_of(self.jobs)
        given = [override for job in self.jobs for override in job.overrides]
        self.constant = [text for text in dict.fromkeys(given) if all(text in job.overrides for job in self.jobs)]
        self.keys = list(dict.fromkeys(text.partition("=")[0] for text in given if text not in self.constant))
        self.names = short_names(key for key in self.keys if key.lstrip("+") != "seed")
        sections = {key.lstrip("+").partition(".")[0] for key in self.names}
        self.trains_alike = sections <= set(SPEED_ONLY)
        done = next((job.summary for job in self.jobs if job.summary), {})
        self.score = str(done.get("score", "test_accuracy"))  # the key in summary.json of a job's score
        self.lower_is_better = bool(done.get("lower_is_better"))
        self.fastest, self.as_fast = self._best(SPEED)
        # The images/s with free data, which are comparable if nothing but the loader differs between jobs.
        free = [setting.figure(SPEED) for setting in self.settings if setting.is_free and sections <= {"loader"}]
        self.ceiling: float | None = max([figure.value for figure in free if figure], default=None)

    def _best(self, key: str) -> tuple[Setting | None, list[Setting]]:
        """The simplest of the settings that are best in `key`, and all of those: the best one and its equals."""
        given = [(one, figure) for one in self.settings if not one.is_free and (figure := one.figure(key))]
        if not given:
            return None, []
        sign = -1 if key == self.score and self.lower_is_better else 1
        best = max((figure for _, figure in given), key=lambda figure: sign * figure.value)
        equals = [setting for setting, figure in given if figure.overlaps(best)]
        return min(equals, key=Setting.complexity), equals

    def label(self, setting: Setting) -> str:
        """The values of the keys that vary, such as "job 2 (loader=torch num_workers=2)"."""
        overrides = " ".join(f"{name}={value}" for name, value in values_of(setting.overrides, self.names).items())
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
        not_done = [
            f"{job.status.capitalize()}: {self.label(Setting([job]))}: {job.error}" for job in self.jobs if job.error
        ]
        return "\n".join([*lines, "", *not_done]).rstrip()

    def _table(self) -> list[str]:
        """The lines of a table with a row per setting. Its columns are the keys that vary, and the known metrics."""
        settings = self.settings
        given = [values_of(setting.overrides, self.names) for setting in settings]
        columns = [["job", *(setting.numbers for setting in settings)]]
        columns += [[name, *(values.get(name, "-") for values in given)] for name in self.names.values()]
        for key, (heading, text) in METRICS.items():
            figures = [setting.figure(key) for setting in settings]
            columns.append([heading, *(text.format(figure.value) if figure else "-" for figure in figures)])
            if key == SPEED:
                columns.append(["spread", *(half_spread(figure, "±{:,.0f}") or "-" for figure in figures)])
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
        setting, equals = (None, []) if self.trains_alike else self._best(self.score)
        if setting is not None and self.fastest not in equals:
            score = f"{self.score.replace('_', ' ')} {self._score(setting)}"
            yield f"{self._named('Most accurate', setting, equals)}, {score}.", setting

    def _score(self, setting: Setting) -> str:
        figure = setting.figure(self.score)
        return f"{figure.value:.4f}{half_spread(figure, ' ±{:.4f}')}" if figure else "-"

    def _named(self, best: str, setting: Setting, equals: list[Setting]) -> str:
        jobs = f"{'job' if len(setting.jobs) == 1 else 'jobs'} {setting.numbers}"
        if len(equals) == 1:
            return f"{best}: {jobs}"
        labels = "; ".join(map(self.label, equals))
        return f"{best}, and equal within their spread: {labels}.\nThe simplest of them: {jobs}"

    def markdown(self) -> str:
        heading, picture = f"# Sweep {self.folder.resolve().name}", "![Speed and waiting of each setting](sweep.png)"
        return f"{heading}\n\n```\n{self.text()}\n```\n\n{picture}\n"

    def csv(self) -> str:
        """A row per job, with the full names of all keys, including the seed."""
        text, metrics = io.StringIO(), [*METRICS, self.score]
        writer = csv.writer(text, lineterminator="\n")
        full = {key: key.lstrip("+") for key in self.keys}
        writer.writerow(["job", *full.values(), *metrics, "status", "error"])
        for job in self.jobs:
            values = map(values_of(job.overrides, full).get, full.values())
            writer.writerow([job.number, *values, *map(job.metric, metrics), job.status, job.error])
        return text.getvalue()

    def picture(self) -> bytes:
        """A PNG with a bar per setting; free data are a dashed line."""
        shown = [one for one in self.settings if self.ceiling is None or not one.is_free] or self.settings
        speeds, waiting = (
            [setting.figure(key) or WORDS.get(setting.status, setting.status) for setting in shown]
            for key in (SPEED, WAITING)
        )
        best = shown.index(self.fastest) if self.fastest else None
        title = "No job measured its speed" if best is None else f"Fastest: {self.label(shown[best])}"
        if len(self.as_fast) > 1:
            title = f"{len(self.as_fast)} are equally fast; the simplest is {self.label(shown[best or 0])}"
        equals = [shown.index(setting) for setting in self.as_fast]
        return draw_bars(
            title, [self.label(setting) for setting in shown], speeds, waiting, best, equals, self.ceiling
        )


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Shortens each key to its last part, unless two keys have the same last part."""
    last = {key: key.lstrip("+").rpartition(".")[2] for key in keys}
    shared = Counter(last.values())
    return {key: part if shared[part] == 1 else key.lstrip("+") for key, part in last.items()}


def values_of(overrides: Iterable[str], names: dict[str, str]) -> dict[str, str]:
    """The values that the overrides set, by name, for the keys in `names` (key: name)."""
    given = (override.partition("=") for override in overrides)
    return {names[key]: value for key, _, value in given if key in names}


def half_spread(figure: Figure | None, text: str) -> str:
    """Half the width of a spread; "" if it is not known."""
    return text.format((figure.high - figure.low) / 2) if figure and figure.low < figure.high else ""


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
        write_whole(paths[0], written)
        write_whole(paths[1], sweep.markdown())
        write_whole(paths[2], sweep.picture())
        sweep = Sweep(folder)
    return paths


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
