"""What a run writes into its folder: metrics.jsonl while it runs, summary.json at its end."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

from training.files import write_whole

REPOSITORY = Path(__file__).resolve().parent.parent


class Record:
    """The files of one run's folder, by default a new one under outputs/."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder or datetime.now().strftime("outputs/%Y-%m-%d_%H-%M-%S_%f"))
        self.folder.mkdir(parents=True, exist_ok=True)

    def metrics(self, **values: Any) -> None:
        """Appends a line to metrics.jsonl, at once: a run can be watched, and a crash loses nothing."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def summary(self, **values: Any) -> dict[str, Any]:
        """Adds the commit and the versions, writes summary.json, and returns its content."""
        versions = {"torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version()}
        versions["torchvision"] = version("torchvision")  # importing it takes longer than importing torch
        summary = {**values, "git_commit": _git_commit(), "versions": versions}
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary


def _git_commit() -> str | None:
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
