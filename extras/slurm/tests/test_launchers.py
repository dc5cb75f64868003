"""Sweeps whose jobs run in other processes, by the launchers of joblib and submitit; and what Slurm's jobs need."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from extras.slurm.slurm import Requeue
from tests.configs import FAST

ROOT = Path(__file__).resolve().parents[3]
SMALL = [*FAST, "callbacks/standard=[best,sweep,slurm]"]


def command(launcher, *arguments):
    where = [f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep"]
    return [sys.executable, str(ROOT / "train.py"), "-m", *where, *SMALL, *arguments]


@pytest.mark.slow
@pytest.mark.timeout(500)  # many processes that import torch
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_in_other_processes_start_workers_and_a_failed_one_is_noted(launcher, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    run = ["loader=prefetch", "loader.num_workers=1,-1"]
    # The other folder, from which neither train.py nor conf/ can be found, is on purpose.
    done = subprocess.run(command(launcher, *run), cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1, done.stderr
    assert "num_workers=-1: give an integer from 0" in (tmp_path / "sweep" / "1" / "train.log").read_text()
    assert "deprecated" not in done.stderr
    assert "Jobs: 1 done, 1 failed" in done.stdout or not (ROOT / "extras" / "sweep").exists()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_sigterm_ends_the_sweep_with_its_jobs_and_their_workers(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    endless = ["data.length=6400", "train.epochs=100000", "loader=torch,prefetch", "loader.num_workers=1"]
    with started(command("joblib", *endless), tmp_path, stderr=subprocess.DEVNULL) as process:
        wait_for_files(process, *(tmp_path / "sweep" / job / "metrics.jsonl" for job in "01"))
        everyone = process.children(recursive=True)
        assert len(everyone) >= 4, "two jobs with a worker each"
        process.terminate()
        assert process.wait(200) == 75
        assert psutil.wait_procs(everyone, timeout=100)[1] == [], "alive"


@contextmanager
def started(command, folder, **options):
    process = psutil.Popen(command, cwd=folder, **options)
    try:
        yield process
    finally:
        for one in [*process.children(recursive=True), process] if process.is_running() else []:
            one.kill()


def wait_for_files(process, *paths):
    until = time.monotonic() + 300
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A function that puts a shell script in the place of a program of Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def put(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return put


IN_ARRAY = {"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "1"}


@pytest.mark.parametrize(
    ("preempted", "array", "asked"),
    [
        ("2026-11-22", {}, ["show job 22", "requeue 22"]),
        ("2026-11-22", IN_ARRAY, ["show job 20_1", "requeue 20_1"]),
        ("None", IN_ARRAY, ["show job 20_1"]),
    ],
)
def test_a_job_that_slurm_preempts_is_requeued(tmp_path, monkeypatch, program, preempted, array, asked):
    program("scontrol", f'echo "$*" >>{tmp_path}/asked\necho " PreemptTime={preempted}"')
    for name, value in {"SLURM_JOB_ID": "22", "SUBMITIT_EXECUTOR": "slurm", **array}.items():
        monkeypatch.setenv(name, value)
    for stopped in (False, True):
        Requeue().on_end(SimpleNamespace(stopped=stopped, is_main=True), None)
    assert (tmp_path / "asked").read_text().splitlines() == asked


def test_the_script_for_several_machines_passes_signals_on_and_is_submitted_again(tmp_path, program):
    program("srun", "echo \"$@\" >srun_got\ntrap 'kill $!; exit 75' USR1\necho >started\nsleep 60 & wait")
    program("scontrol", 'echo "$*" >>asked\necho node7')
    settings = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "PYTHON": "python"}
    script = ["bash", str(ROOT / "extras" / "slurm" / "train.sh"), "data=packed"]
    with started(script, tmp_path, env={**os.environ, **settings}) as process:
        wait_for_files(process, tmp_path / "started")
        process.send_signal(signal.SIGUSR1)  # as 60 seconds before the time is up
        assert process.wait(60) == 75
    assert (tmp_path / "asked").read_text().splitlines() == ["show hostnames node[7-8]", "requeue 12"]
    got = (tmp_path / "srun_got").read_text()
    assert "--rdzv-endpoint=node7:20012" in got and got.rstrip().endswith("hydra.run.dir=outputs/slurm-12 data=packed")
