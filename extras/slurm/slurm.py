"""Requeue: what a job of hydra/launcher=submitit_slurm needs besides submitit."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from training.run import Run


class Requeue:
    """Requeues this Slurm job if Slurm preempted it, and the job exits before the grace time is over.

    Slurm itself requeues only the jobs that it has to kill at the end of the grace time.
    """

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        job, array = (os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "ARRAY_JOB_ID"))
        if not (run.stopped and run.is_main and job and "SUBMITIT_EXECUTOR" in os.environ):
            return
        if array is not None:  # SLURM_JOB_ID alone can name the whole array, which is the sweep
            job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False).stdout
        if "PreemptTime=2" in shown:  # a year; a job that was not preempted has PreemptTime=None
            subprocess.run(["scontrol", "requeue", job], check=False)
