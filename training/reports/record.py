"""What a run writes into its folder: metrics.jsonl while it runs, summary.json and report.md at its end."""

from __future__ import annotations

import json
import logging
import math
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

from loaders import Preloader
from training.config import Config
from training.files import write_whole
from training.reports.loggers import Loggers, Run
from training.reports.report import Report
from training.reports.timeline_plot import draw_timeline, trace
from training.stopping import Stopped

log = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]


class Record:
    """The files of one run's folder, by default a new one under outputs/, and the loggers that `config` chooses.

    Only the main process writes them. If its `with` block ends without a summary, the loggers call the run failed.
    """

    def __init__(self, folder: Path | str | None = None, writes: bool = True, config: Config | None = None) -> None:
        self.folder = Path(folder or datetime.now().strftime("outputs/%Y-%m-%d_%H-%M-%S_%f"))
        self._writes, self._config = writes, config
        self._loggers = Loggers()
        self.score, self._sign = "test_accuracy", 1  # by which the best checkpoint is chosen; -1: the lowest is best
        self.scores: dict[int, float] = {}  # after which step
        if writes:
            self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self._loggers.finish()

    def begin(self, step: int, score: str = "test_accuracy", higher_is_better: bool = True) -> None:
        """Removes what an earlier run in this folder wrote after `step`, from which training goes on.

        Then starts the loggers. `score`: the key of metrics.jsonl by which the best checkpoint is chosen. Raises
        ConfigError for a key that a logger does not have.
        """
        self.score, self._sign = score, 1 if higher_is_better else -1
        if not self._writes:
            return
        (self.folder / "summary.json").unlink(missing_ok=True)
        path = self.folder / "metrics.jsonl"
        if path.exists():
            lines = [line for line in path.read_text(errors="replace").splitlines() if _step(line) <= step]
            write_whole(path, "".join(f"{line}\n" for line in lines))
            for values in map(json.loads, lines):
                self._note(values)
        if self._config is not None:
            self._loggers.start(Run(self.folder.absolute(), step, asdict(self._config)))

    def metrics(self, **values: Any) -> None:
        """Appends a line to metrics.jsonl, at once: a run can be watched, and a crash loses nothing."""
        self._note(values)
        if self._writes:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(finite(values), allow_nan=False) + "\n")
            self._loggers.metrics(values)

    def is_best(self, step: int) -> bool:
        """Whether no other step has a better score."""
        return self._sign * self.scores[step] >= max(self._sign * score for score in self.scores.values())

    def has_stalled(self, evaluations: int | None) -> bool:
        """Whether the last so many evaluations were no better than one before them."""
        scores = [self._sign * self.scores[step] for step in sorted(self.scores)]
        return evaluations is not None and scores.index(max(scores)) + evaluations < len(scores) if scores else False

    def _note(self, values: dict[str, Any]) -> None:
        score = values.get(self.score)
        if score is not None:
            self.scores[values["step"]] = score

    def finished(self) -> dict[str, Any] | None:
        """The summary of a run that has ended in this folder, if one has."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def summary(self, **values: Any) -> dict[str, Any]:
        """Adds the commit and the versions, writes summary.json, and returns its content."""
        versions = {"torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version()}
        versions["torchvision"] = version("torchvision")  # importing it takes longer than importing torch
        summary = {**values, "git_commit": _git_commit(), "versions": versions}
        self.draft(**summary)
        self._loggers.finish(summary)
        return summary

    def draft(self, **values: Any) -> None:
        """Writes what is known of the summary so far."""
        if self._writes:
            write_whole(self.folder / "summary.json", json.dumps(finite(values), indent=2, allow_nan=False) + "\n")

    def report(self, report: Report) -> None:
        """Writes report.md, and timeline.json and timeline.png if the run recorded a timeline."""
        if not self._writes:
            return
        text = f"# Run {self.folder.resolve().name}\n\n```\n{report.text}\n```\n"
        if report.timeline is not None:
            spans = report.timeline.spans()
            write_whole(self.folder / "timeline.json", trace(spans))
            write_whole(self.folder / "timeline.png", draw_timeline(spans))
            text += "\n![What workers, preloader and training did, and when](timeline.png)\n"
        write_whole(self.folder / "report.md", text)

    @contextmanager
    def reports_a_stop(self, report: Report, loader: Preloader) -> Iterator[None]:
        """Writes the report of a run that a signal stops in here, from what has been measured."""
        try:
            yield
        except Stopped:
            try:
                total = report.timer.run()
                if total.steps:
                    report.finish(total, loader, trials=None)
                    self.report(report)
            except Exception as error:  # the checkpoint is saved: the run has to exit as stopped
                log.warning("report.md could not be written: %s", error)
            raise


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values with null in place of numbers that JSON does not have: a loss may be NaN."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def _step(line: str) -> float:
    """The step of a line of metrics.jsonl; infinity for a line of which only a part was written."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _git_commit() -> str | None:
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
