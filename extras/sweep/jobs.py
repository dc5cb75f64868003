"""The jobs of a sweep, as Hydra names them: sweep.py notes each one's start and end.

A job may run in another process or on another machine (hydra/launcher=joblib, submitit_slurm), so a note is a file:
.sweep/NUMBER.json in the sweep's folder. The report is made of them and of each job's summary.json.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from training.files import write_whole

STATUSES = ("done", "failed", "unfinished")
NOTES = ".sweep"


@dataclass(frozen=True)
class Job:
    number: int
    folder: str  # where its summary.json is
    overrides: list[str]  # as given on the command line: loader=torch
    status: str  # one of STATUSES
    error: str = ""  # why it is not done

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty if the job is not done."""
        found: dict[str, Any] = {}
        if self.status == "done":
            with suppress(OSError, ValueError):
                found = json.loads(Path(self.folder, "summary.json").read_text())
        return found


def read_jobs(folder: Path) -> list[Job]:
    jobs = [Job(**json.loads(note.read_text())) for note in (folder / NOTES).glob("[0-9]*.json")]
    return sorted(jobs, key=lambda job: job.number)


def sweep_folder(config: DictConfig) -> Path:
    return Path(config.hydra.runtime.cwd, config.hydra.sweep.dir).resolve()  # a job may have another working directory


def write_note(config: DictConfig, status: str, error: str = "") -> None:
    hydra, notes = config.hydra, sweep_folder(config) / NOTES
    job = Job(hydra.job.num, hydra.runtime.output_dir, list(hydra.overrides.task), status, " ".join(error.split()))
    notes.mkdir(parents=True, exist_ok=True)
    write_whole(notes / f"{job.number}.json", json.dumps(asdict(job)))
