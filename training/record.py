"""What a run leaves in its folder: metrics.jsonl as it goes, summary.json at its end."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy
import torch
import torchvision
from hydra.core.hydra_config import HydraConfig

from training.files import write_whole

REPOSITORY = Path(__file__).resolve().parent.parent


class Record:
    """The files of one run's folder (by default Hydra's output folder, else a new one under outputs/)."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder) if folder is not None else _run_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = (self.folder / "metrics.jsonl").open("a")

    def metrics(self, **values: Any) -> None:
        """Appends a line to metrics.jsonl, at once, so that a run can be watched and a crash loses nothing."""
        self._metrics.write(json.dumps(values) + "\n")
        self._metrics.flush()

    def summary(self, **values: Any) -> dict[str, Any]:
        """Writes summary.json, with the commit and the versions added, and returns it."""
        summary = {**values, "git_commit": _git_commit(), "versions": _versions()}
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()


def _run_folder() -> Path:
    if HydraConfig.initialized():
        return Path(HydraConfig.get().runtime.output_dir)
    return Path("outputs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")


def _git_commit() -> str | None:
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": numpy.__version__,
    }
