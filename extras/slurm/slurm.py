"""What jobs in other processes and on other machines need: hydra/launcher=joblib, submitit_slurm, submitit_local."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

from hydra.experimental.callback import Callback

from training.config import ROOT
from training.run import Run
from training.stopping import Stopped


class Launchers(Callback):
    """Hydra's callback, in the process that starts a sweep: its jobs import the repository, from any folder."""

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        signal.signal(signal.SIGTERM, stop_sweep)  # by default it would end this process, and joblib's would train on


def stop_sweep(number: int, frame: object) -> None:
    raise Stopped("stopped by SIGTERM", number)


class Requeue:
    """Requeues this Slurm job if Slurm preempted it, and the job exits before the grace time is over.

    Slurm itself requeues only the jobs that it kills at the end of the grace time.
    """

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        job, array = (os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "ARRAY_JOB_ID"))
        if not (run.stopped and run.is_main and job and "SUBMITIT_EXECUTOR" in os.environ):
            return
        if array is not None:  # SLURM_JOB_ID alone can name the whole array, which is the sweep
            job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False)
        if "PreemptTime=2" in shown.stdout:  # a year; a job that was not preempted has PreemptTime=None
            subprocess.run(["scontrol", "requeue", job], check=False)
