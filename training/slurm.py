"""What jobs on a Slurm cluster need: conf/callbacks/standard/slurm.yaml, conf/hydra/launcher/submitit_slurm.yaml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

from hydra.experimental.callback import Callback

from training.run import Run


class CheckSlurm(Callback):
    """Hydra's callback: ends a sweep in a sentence if there is no Slurm here to submit its jobs to."""

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        if config.hydra.runtime.choices.get("hydra/launcher") == "submitit_slurm" and shutil.which("srun") is None:
            sys.exit(
                "error: hydra/launcher=submitit_slurm submits to Slurm, and there is no srun here: run it on a login "
                "node of the cluster, or use hydra/launcher=joblib on this machine"
            )


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
