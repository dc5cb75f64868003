"""SweepTable: Hydra's callback, which rewrites a sweep's report (sweep.csv, .md and .png) when one of its jobs ends."""

from __future__ import annotations

import atexit
import logging
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from extras.sweep.jobs import NOTES, read_jobs, sweep_folder, write_note
from extras.sweep.report import Sweep, write_report
from training.processes import rank

log = logging.getLogger(__name__)


class SweepTable(Callback):
    """Hydra makes one in the program that was started, and one in each process that runs jobs."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        folder = sweep_folder(config)
        if rank() == 0:
            for note in (folder / NOTES).glob("[0-9]*.json"):  # of an earlier sweep in this folder
                note.unlink()
            atexit.register(print_sweep, folder)  # Hydra calls on_multirun_end only if all jobs succeed

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        if is_noted(config):
            write_note(config, "unfinished", "it was interrupted, or is still running")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if not is_noted(config):
            return
        if job_return.status == JobStatus.FAILED:
            write_note(config, "failed", str(job_return._return_value))  # the property would raise it
        else:
            write_note(config, "done")
        try:
            write_report(sweep_folder(config))
        except Exception as error:  # the other jobs matter more than the report
            log.warning("the sweep's report could not be written: %s: %s", type(error).__name__, error)


def is_noted(config: DictConfig) -> bool:
    return bool(config.hydra.mode == RunMode.MULTIRUN and rank() == 0)


def print_sweep(folder: Path) -> None:
    """Prints the report, also after Ctrl-C and of a sweep that failed."""
    if read_jobs(folder):
        print(Sweep(folder).text())
