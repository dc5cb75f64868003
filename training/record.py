"""Record: the files that a run writes, metrics.jsonl while it trains, and summary.json and report.md at its end."""

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
from training.callbacks.loggers.logger import Loggers, Run
from training.callbacks.report.report import Report
from training.callbacks.timeline import draw_timeline, trace
from training.config import Config
from training.files import write_whole
from training.stopping import Stopped

log = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[1]


class Record:
    """The files of one run, and the loggers that `config` chooses.

    folder: where they go; None makes a new folder in outputs/. writes: False in all processes but the main one. If the
    `with` block is left without `finish`, the loggers mark the run as failed.
    """

    def __init__(self, folder: Path | str | None = None, writes: bool = True, config: Config | None = None) -> None:
        self.folder = Path(folder or datetime.now().strftime("outputs/%Y-%m-%d_%H-%M-%S_%f"))
        self._writes, self._config = writes, config
        self._loggers = Loggers()
        self.score_name = "test_accuracy"  # key in metrics.jsonl of the score that chooses the best checkpoint
        self._sign = 1  # -1 if a lower score is better
        self.scores: dict[int, float] = {}  # by step
        if writes:
            self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self._loggers.finish()

    def begin(self, step: int, score_name: str = "test_accuracy", higher_is_better: bool = True) -> None:
        """Removes what an earlier run in this folder wrote after `step`, where training continues; starts the loggers.

        score_name: the key in metrics.jsonl of the score that chooses the best checkpoint. Raises ConfigError if a
        logger has an unknown key.
        """
        self.score_name, self._sign = score_name, 1 if higher_is_better else -1
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
        """Appends a line to metrics.jsonl, and passes its numbers to the loggers."""
        self._note(values)
        if self._writes:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(finite(values), allow_nan=False) + "\n")
            self._loggers.metrics(values)

    def is_best(self, step: int) -> bool:
        """Whether no step has a better score than `step`."""
        return self._sign * self.scores[step] >= max(self._sign * score for score in self.scores.values())

    def has_stalled(self, evaluations: int | None) -> bool:
        """Whether the best score is older than the last `evaluations` scores; None: never."""
        if evaluations is None or not self.scores:
            return False
        scores = [self._sign * self.scores[step] for step in sorted(self.scores)]
        return scores.index(max(scores)) + evaluations < len(scores)

    def _note(self, values: dict[str, Any]) -> None:
        score = values.get(self.score_name)
        if score is not None:  # NaN counts as the worst score: no comparison with it would be true
            self.scores[values["step"]] = -self._sign * math.inf if math.isnan(score) else score

    def earlier_summary(self) -> dict[str, Any] | None:
        """The summary of a run that finished in this folder; None without one."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def finish(self, **values: Any) -> dict[str, Any]:
        """Writes summary.json, with the commit and versions added; closes the loggers. Returns the summary."""
        versions = {"torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version()}
        versions["torchvision"] = version("torchvision")  # importing it takes longer than importing torch
        summary = {**values, "git_commit": _git_commit(), "versions": versions}
        self.write_summary(**summary)
        self._loggers.finish(summary)
        return summary

    def write_summary(self, **values: Any) -> None:
        """Writes summary.json, which marks the run as finished."""
        if self._writes:
            write_whole(self.folder / "summary.json", json.dumps(finite(values), indent=2, allow_nan=False) + "\n")

    def write_report(self, report: Report) -> None:
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
    def report_if_stopped(self, report: Report, loader: Preloader) -> Iterator[None]:
        """If a signal stops the run in this block, writes the report of what was measured until then."""
        try:
            yield
        except Stopped:
            try:
                total = report.timer.run()
                if total.steps:
                    report.finish(total, loader, trials=None)
                    self.write_report(report)
            except Exception as error:  # must not replace Stopped: the checkpoint is saved
                log.warning("report.md could not be written: %s", error)
            raise


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def _step(line: str) -> float:
    """The step of a line of metrics.jsonl; infinity for an incomplete line."""
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
