"""Lets jobs run in other processes and on other machines: hydra/launcher=joblib, submitit_slurm, submitit_local."""

import os
import signal
import subprocess
from typing import Any

from hydra.experimental.callback import Callback

from training.config import ROOT
from training.run import Run
from training.stopping import Stopped


class Launchers(Callback):
    """A callback of Hydra, in the process that starts a sweep: lets the jobs import the repository in any folder."""

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        signal.signal(signal.SIGTERM, stop_sweep)  # by default only this process would exit, not joblib's jobs


def stop_sweep(number: int, frame: object) -> None:
    raise Stopped("stopped by SIGTERM", number)


class Requeue:
    """Requeues a preempted Slurm job, because it exits before the grace time is over.

    Slurm itself requeues only the jobs that it has to kill at the end of the grace time.
    """

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        job, array = (os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "ARRAY_JOB_ID"))
        if not (run.stopped and run.is_main and job and "SUBMITIT_EXECUTOR" in os.environ):
            return
        if array is not None:  # SLURM_JOB_ID alone can stand for the whole array: the sweep
            job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False)
        if "PreemptTime=2" in shown.stdout:  # PreemptTime=2026-...; it is None for a job that was not preempted
            subprocess.run(["scontrol", "requeue", job], check=False)
