"""Sweeps whose jobs run in other processes, side by side: the launchers of joblib and submitit, and the report."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from training.config import ConfigError
from training.files import write_whole
from training.launch import all_done, check_launcher
from training.slurm import Requeue

sweep_module = pytest.importorskip("training.sweeps.sweep", reason="a fork may have deleted it")
Sweep, write_report, print_sweep = sweep_module.Sweep, sweep_module.write_report, sweep_module.print_sweep

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["data=synthetic", "data.test_length=16", "data.image_size=8", "model=linear", "train.batch_size=16"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # two jobs on two cores would wait for each other's threads


def sweep_command(launcher: str, *arguments: str) -> list[str]:
    where = [f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep"]
    return [sys.executable, str(ROOT / "train.py"), "-m", *where, *SMALL, *arguments]


@contextmanager
def sweeping(launcher: str, folder: Path, jobs: str, bound: float, *settings: str, **how) -> Iterator[psutil.Popen]:
    """A sweep's own process, once all its jobs train. In the end it and all that it has started are killed."""
    process = psutil.Popen(sweep_command(launcher, *settings), cwd=folder, env=ONE_THREAD, text=True, **how)
    try:
        until = time.monotonic() + bound
        while not all((folder / "sweep" / job / "metrics.jsonl").exists() for job in jobs):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        yield process
    finally:
        for one in [*process.children(recursive=True), process] if process.is_running() else []:
            one.kill()


def add_job(sweep: Path, number: int, *overrides: str) -> Path:
    (sweep / str(number) / ".hydra").mkdir(parents=True)
    (sweep / str(number) / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    return sweep / str(number)


def finish(job: Path, speed: float = 1000.0) -> None:
    write_whole(job / "summary.json", json.dumps({"loader": "torch", "images_per_second": speed}))  # as a run does


# Real launchers


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
@pytest.mark.timeout(300)  # many processes that import torch
def test_jobs_in_other_processes_start_workers_and_a_failed_one_is_in_the_table(launcher, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    run = ["data.length=64", "train.epochs=1", "loader=prefetch", "loader.num_workers=1,2,-1"]
    # The other folder, from which neither train.py nor conf/ can be found, is on purpose.
    done = subprocess.run(
        sweep_command(launcher, *run), cwd=tmp_path, env=ONE_THREAD, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1, done.stderr
    assert [job.status for job in Sweep(tmp_path / "sweep").jobs] == ["done", "done", "failed"], done.stderr
    assert "Jobs: 2 done, 1 failed" in done.stdout
    assert "loader.num_workers=-1: give a number from 0" in done.stdout
    assert "Jobs: 2 done, 1 failed" in (tmp_path / "sweep" / "sweep.md").read_text()
    assert "deprecated" not in done.stderr


@pytest.mark.parametrize(
    ("launcher", "kill", "number", "code"),
    [
        ("joblib", os.killpg, signal.SIGINT, 130),  # Ctrl-C: a terminal sends it to the whole process group
        ("joblib", os.kill, signal.SIGTERM, 75),
        ("submitit_local", os.killpg, signal.SIGINT, 130),
    ],
)
@pytest.mark.timeout(300)  # many processes that import torch
def test_a_signal_ends_the_sweep_with_its_jobs_and_their_workers(launcher, kill, number, code, tmp_path, bound):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    endless = ["data.length=6400", "train.epochs=100000", "loader=torch,prefetch", "loader.num_workers=1"]
    own_group = {"start_new_session": True, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with sweeping(launcher, tmp_path, "01", bound, *endless, **own_group) as process:
        everyone = process.children(recursive=True)
        assert len(everyone) >= 4, "two jobs with a worker each"
        kill(process.pid, number)
        printed, _ = process.communicate(timeout=bound)
        assert process.returncode == code
        assert "Jobs: 2 unfinished" in printed
        _, alive = psutil.wait_procs(everyone, timeout=bound)
        assert not alive


@pytest.mark.timeout(300)  # many processes that import torch
def test_a_job_that_submitit_interrupts_resumes_by_itself_in_its_own_folder(tmp_path, bound):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    long = ["data.length=1600", "train.epochs=2", "train.log_interval=5", "loader=prefetch"]
    # So slow that it is still training when the signal comes.
    slow = ["loader.num_workers=1", "data.cost=wait", "data.cost_ms=2"]
    with sweeping("submitit_local", tmp_path, "0", bound, *long, *slow, stdout=subprocess.DEVNULL) as process:
        (controller,) = process.children()
        (job,) = controller.children()
        job.send_signal(signal.SIGUSR2)  # as Slurm does when submitit's job has to go
        assert process.wait(timeout=bound) == 0
    folder = tmp_path / "sweep" / "0"
    assert "resuming after step" in (folder / "train.log").read_text()
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps)) and steps[-1] == 200
    assert [path.name for path in (tmp_path / "sweep").glob("[0-9]*")] == ["0"]


# A launcher that cannot work


def test_a_launcher_that_is_not_installed_is_refused_with_the_pip_command(monkeypatch):
    monkeypatch.setattr("training.launch.distributions", lambda name: [])
    sentence = "hydra/launcher=joblib needs .*, which is not installed: pip install hydra-joblib-launcher"
    with pytest.raises(ConfigError, match=sentence):
        check_launcher(["-m", "seed=0,1", "hydra/launcher=joblib"])
    check_launcher(["-m", "seed=0,1"])


def test_submitting_to_slurm_without_slurm_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no srun here: run it on a login node"):
        check_launcher(["-m", "hydra/launcher=submitit_slurm"])


@pytest.mark.parametrize(
    ("preempted", "array", "asked"),
    [
        ("2026-11-22T01:37:52", None, ["show job 22", "requeue 22"]),
        ("2026-11-22T01:37:52", "20", ["show job 20_1", "requeue 20_1"]),
        ("None", "20", ["show job 20_1"]),
    ],
)
def test_a_job_that_slurm_preempts_is_requeued_and_no_other_job(tmp_path, monkeypatch, preempted, array, asked):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\necho " PreemptTime={preempted}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "22")
    for name, value in (("SLURM_ARRAY_JOB_ID", array), ("SLURM_ARRAY_TASK_ID", array and "1")):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    for stopped in (False, True):
        Requeue().on_end(SimpleNamespace(stopped=stopped, is_main=True), None)
    assert (tmp_path / "asked").read_text().splitlines() == asked


# A report that many processes write


def end_at_once(sweep: Path, numbers: list[int], start: multiprocessing.Barrier) -> None:
    for number in numbers:
        start.wait(60)
        finish(sweep / str(number))
        write_report(sweep)


def test_every_job_is_in_the_report_once_when_many_processes_end_at_the_same_moment(tmp_path, monkeypatch, bound):
    monkeypatch.setattr("training.sweeps.sweep.Sweep.picture", lambda *_: b"a picture")
    fork = multiprocessing.get_context("fork")
    processes, rounds = 8, 5
    for number in range(processes * rounds):
        add_job(tmp_path, number, f"seed={number}")
    start = fork.Barrier(processes)
    jobs = [[one + processes * turn for turn in range(rounds)] for one in range(processes)]
    writers = [fork.Process(target=end_at_once, args=(tmp_path, numbers, start)) for numbers in jobs]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(bound)
        assert writer.exitcode == 0
    rows = [line.split(",") for line in (tmp_path / "sweep.csv").read_text().splitlines()[1:]]
    assert [int(row[0]) for row in rows] == list(range(processes * rounds))
    assert {"done"} == {row[-2] for row in rows}
    assert f"Jobs: {processes * rounds} done" in (tmp_path / "sweep.md").read_text()
    assert not list(tmp_path.glob(".sweep*")), "temporary files"


def test_a_job_that_ends_while_the_report_is_written_is_in_it(tmp_path, monkeypatch):
    early, late = add_job(tmp_path, 0, "seed=0"), add_job(tmp_path, 1, "seed=1")
    finish(early)

    def draw(*_):  # the last of the three files: the table has been written without the second job's speed
        finish(late)
        return b"a picture"

    monkeypatch.setattr("training.sweeps.sweep.Sweep.picture", draw)
    write_report(tmp_path)
    assert "Jobs: 2 done" in (tmp_path / "sweep.md").read_text()


def test_the_launching_process_knows_from_the_folders_whether_a_job_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.sweeps.sweep.Sweep.picture", lambda *_: b"a picture")
    assert not all_done(tmp_path), "no job has begun"
    finish(add_job(tmp_path, 0, "seed=0"))
    assert all_done(tmp_path)
    (add_job(tmp_path, 1, "seed=1") / "error.txt").write_text("no memory is left")
    assert not all_done(tmp_path)
    print_sweep(tmp_path)
    assert "Failed: job 1: no memory is left" in capsys.readouterr().out
