"""Results: metrics.jsonl, which a run writes while it trains, summary.json at its end, and the scores in them."""

from __future__ import annotations

import json
import logging
import math
import platform
import subprocess
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

from training.config import CONF
from training.files import write_whole

log = logging.getLogger(__name__)


class Results:
    """What one run measures, and its files.

    folder: where they go; None makes a new folder in outputs/. writes: False in all processes but the main one.
    score_name: the key in metrics.jsonl of the score that chooses the best checkpoint. scores: its values, by step.
    sign: 1, or -1 if a lower score is better.
    """

    def __init__(self, folder: Path | str | None = None, writes: bool = True) -> None:
        self.folder = Path(folder or datetime.now().strftime("outputs/%Y-%m-%d_%H-%M-%S_%f"))
        self._writes, self._nan = writes, ""  # the warning of a loss that is NaN
        self.scores: dict[int, float] = {}
        if writes:
            self.folder.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int, score_name: str, higher_is_better: bool, at_epoch_end: bool = False) -> None:
        """Removes what an earlier run in this folder wrote after the checkpoint of `step`, where it continues.

        at_epoch_end: whether the checkpoint ends an epoch, whose evaluation and callbacks follow.
        """
        self.score_name, self.sign = score_name, 1 if higher_is_better else -1
        if not self._writes:
            return
        (self.folder / "summary.json").unlink(missing_ok=True)
        path = self.folder / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(errors="replace").splitlines()
            lines = [line for line in lines if _precedes(line, step, at_epoch_end)]
            write_whole(path, "".join(f"{line}\n" for line in lines))
            for values in map(json.loads, lines):
                self._note(values)

    def metrics(self, **values: Any) -> None:
        """Appends a line to metrics.jsonl. Warns once of a loss that is NaN or infinite: training cannot recover."""
        self._note(values)
        if not math.isfinite(values.get("loss", 0)) and not self._nan:
            advice = "is there a NaN in the data, or is optim.lr too high? train.clip_norm may help"
            self._nan = f"the loss is {values['loss']:g} by step {values['step']}: {advice}"
            log.warning("%s", self._nan)
        if self._writes:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(finite(values), allow_nan=False) + "\n")

    def is_best(self, step: int) -> bool:
        """Whether no step has a better score than `step`."""
        return self.sign * self.scores[step] >= max(self.sign * score for score in self.scores.values())

    def _note(self, values: dict[str, Any]) -> None:
        if self.score_name in values:  # what is not finite, None in the file, counts as the worst score
            score = values[self.score_name]
            is_finite = score is not None and math.isfinite(score)
            self.scores[values["step"]] = score if is_finite else -self.sign * math.inf

    def earlier_summary(self) -> dict[str, Any] | None:
        """The summary of a run that finished in this folder; None without one."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def finish(self, **values: Any) -> dict[str, Any]:
        """Writes summary.json, with the commit and versions added: the run is finished. Returns the summary."""
        if self._nan:
            log.warning("%s", self._nan)
        versions = {"torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version()}
        versions["torchvision"] = version("torchvision")  # importing it takes longer than importing torch
        summary = {**values, "git_commit": _git_commit(), "versions": versions}
        if self._writes:
            write_whole(self.folder / "summary.json", json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")
        return summary


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replaces NaN and infinity, which JSON does not have, by None; tensors and numpy's numbers by their content."""
    plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in values.items()}
    wrong = [key for key, value in plain.items() if isinstance(value, float) and not math.isfinite(value)]
    return plain | dict.fromkeys(wrong)


def _precedes(line: str, step: int, at_epoch_end: bool) -> bool:
    """Whether the line of metrics.jsonl was written before the checkpoint of `step`; False for an incomplete line."""
    try:
        values = json.loads(line)
        return values["step"] < step + (not at_epoch_end or "lr" in values)  # lines of training steps have a rate
    except (ValueError, KeyError, TypeError):
        return False


def _git_commit() -> str | None:
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(CONF.parent), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None
