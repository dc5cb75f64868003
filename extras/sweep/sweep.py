"""SweepTable: Hydra's callback, which writes a sweep's report (sweep.csv, .md and .png) when jobs end, and at its end.

A job may run in another process or on another machine (hydra/launcher=joblib, submitit_slurm), and its folder may have
any name. So each job notes its start and end in the file .sweep/NUMBER.json.
"""

import atexit
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from extras.sweep.report import EARLIER, NOTES, Sweep, may_replace, write_report
from training.command_line import command_of
from training.files import write_whole
from training.processes import rank
from training.results import sentence_of

REPORTS = 0.02  # share of the time of a sweep that may go into writing its report


class SweepTable(Callback):
    """Hydra makes one in the program that was started, and one in each process that runs jobs."""

    running: DictConfig | None = None  # the config of the job that this process runs
    next_report = 0.0  # when time.monotonic() is past it, the end of a job writes the report

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if rank() == 0:
            notes = folder_of(config) / NOTES
            shutil.rmtree(notes, ignore_errors=True)  # those of an earlier sweep in this folder
            if (folder_of(config) / "sweep.csv").exists():
                notes.mkdir(exist_ok=True)
                (notes / EARLIER).touch()
            atexit.register(self._end, folder_of(config))  # Hydra calls on_multirun_end only if all jobs succeed

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        self.running = config
        write_note(config, "unfinished", "it was interrupted, or is still running")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        self.running = None
        failed = job_return.status == JobStatus.FAILED
        error = str(job_return._return_value) if failed else ""  # the property would raise it
        write_note(config, "failed" if failed else "done", error)
        began = time.monotonic()
        if rank() == 0 and (folder_of(config) / NOTES).exists() and began >= self.next_report:
            write_report(folder_of(config))  # Hydra turns an error of a callback into a warning
            ended = time.monotonic()
            self.next_report = ended + (ended - began) / REPORTS

    def _end(self, folder: Path) -> None:
        """Prints and writes the report, also after Ctrl-C, and if jobs failed."""
        error = getattr(sys, "last_value", None)
        if self.running is not None and error is not None:  # under torchrun, where a job that fails ends the program
            write_note(self.running, "failed", sentence_of(error))
        sweep = Sweep(folder)
        if sweep.jobs:
            print(sweep.text())
            if may_replace(sweep):
                write_report(folder)
            else:
                print(f"No job is done, so {folder / 'sweep.csv'} is still that of an earlier sweep")


def folder_of(config: DictConfig) -> Path:
    return Path(config.hydra.runtime.cwd, config.hydra.sweep.dir).resolve()  # a job may have another working directory


def write_note(config: DictConfig, status: str, error: str = "") -> None:
    hydra = config.hydra
    if hydra.mode != RunMode.MULTIRUN or rank() > 0:
        return
    settings: Any = OmegaConf.to_container(hydra)
    flags = [flag for flag in command_of(settings, [])["flags"] if flag != "--config-name=config"]
    if not any(line.startswith("hydra.mode=") for line in hydra.overrides.hydra):
        flags.append("hydra.mode=RUN")  # a yaml file asks for a sweep, also of the command that the report shows
    note = {
        "number": hydra.job.num,
        "folder": hydra.runtime.output_dir,
        "flags": flags,
        "overrides": list(hydra.overrides.task),
        "status": status,
        "error": " ".join(error.split()),
    }
    notes = folder_of(config) / NOTES
    notes.mkdir(parents=True, exist_ok=True)
    write_whole(notes / f"{hydra.job.num}.json", json.dumps(note))
