"""Runs of several processes, as torchrun starts them, against the same run in one process."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from training.config import ConfigError
from training.processes import meet, start_processes

ROOT = Path(__file__).resolve().parents[2]
LONG = 150  # seconds within which every run has to end
# A linear model, because batch norm takes its statistics over a process's part of a batch.
SETTINGS = [
    *("data=synthetic", "data.length=1600", "data.test_length=65", "data.image_size=8", "model=linear"),
    *("train.batch_size=16", "train.epochs=2", "train.log_interval=10", "loader.num_workers=1", "optim.lr=0.01"),
]


class Run:
    """A run of `processes` processes in `folder`/out; 0 starts train.py without torchrun."""

    def __init__(self, folder: Path, *overrides: str, processes: int = 2, restarts: int = 3) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out = folder / "out"
        command = [str(ROOT / "train.py"), f"hydra.run.dir={self.out}", *SETTINGS, *overrides]
        if processes:
            torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
            command = [*torchrun, "--monitor-interval=0.1", *command]
        self.output = (folder / "output.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ranks(self) -> list[psutil.Process]:
        """The processes that torchrun started, by rank, or as many as there are at the moment."""
        try:
            children = psutil.Process(self.process.pid).children()
            return sorted((c for c in children if "RANK" in c.environ()), key=lambda c: int(c.environ()["RANK"]))
        except psutil.Error:
            return []

    def wait_for_step(self, step: int) -> None:
        """Waits until the checkpoint of a step from `step` on is there."""
        checkpoints = self.out / "checkpoints"
        self.wait_for(lambda: any(int(path.stem[5:]) >= step for path in checkpoints.glob("step-*.pt")))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.002)

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def wait(self) -> int:
        try:
            return self.process.wait(LONG)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"the run did not end: {self.text()}")

    def finish(self) -> "Run":
        assert self.wait() == 0, self.text()
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.out / "checkpoints" / "last.pt", weights_only=True)["model"]

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]


def same_bits(one: Run, other: Run) -> bool:
    theirs = other.weights()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.weights().items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    """A run of two processes that nothing interrupts."""
    return Run(tmp_path_factory.mktemp("undisturbed")).finish()


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("single"), processes=0).finish()


def test_two_processes_train_as_one_does_with_the_same_batches(undisturbed, single):
    ours, theirs = undisturbed.metrics(), single.metrics()
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-5)
        assert mine.get("test_accuracy") == other.get("test_accuracy"), "65 test samples, each counted once"
    weights = single.weights()
    for name, tensor in undisturbed.weights().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5)


def test_several_processes_write_one_folder_and_one_log(undisturbed):
    summary = json.loads((undisturbed.out / "summary.json").read_text())
    assert summary["processes"] == 2 and summary["batch_size"] == 16
    assert {path.name for path in undisturbed.out.parent.iterdir()} == {"out", "output.txt"}
    log = (undisturbed.out / "train.log").read_text()
    assert log.count("epoch 2: accuracy") == 1 == undisturbed.text().count("epoch 2: accuracy")


def test_without_a_given_folder_a_restarted_run_finds_its_own(tmp_path, monkeypatch):
    from training.command_line import complete

    monkeypatch.chdir(tmp_path)
    about = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**about, "TORCHELASTIC_RUN_ID": "25c4b6c4-1232-4f36"}.items():
        monkeypatch.setenv(name, value)
    (first,) = complete([])
    Path(first.partition("=")[2].strip("'")).mkdir(parents=True)
    assert complete([]) == [first]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert complete([]) != [first]


def test_more_processes_than_gpus_are_refused_with_both_numbers(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "unused")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = SimpleNamespace(device="auto", train=SimpleNamespace(batch_size=16, sync_batchnorm=False))
    with pytest.raises(ConfigError, match=r"2 processes on this machine, which has 1 GPUs?: .*--nproc-per-node=gpu"):
        start_processes(config)


def test_processes_that_are_started_again_meet_though_the_store_has_the_requests_of_an_earlier_start():
    store, limit = torch.distributed.HashStore(), timedelta(seconds=60)
    store.set("request/1", "from a process that has exited before rank 0 answered it")
    with ThreadPoolExecutor(3) as threads:
        names = [set(threads.map(lambda rank: meet(store, rank, 3, limit), range(3))) for _ in range(3)]
    assert all(len(one) == 1 for one in names) and len(set.union(*names)) == 3


def test_a_process_that_does_not_come_is_named():
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come"):
        meet(torch.distributed.HashStore(), 0, 3, timedelta(seconds=0))


def test_after_a_rank_was_killed_the_run_goes_on_to_the_same_weights(tmp_path, undisturbed):
    run = Run(tmp_path, "train.checkpoint_every=10")
    run.wait_for_step(30)
    run.ranks()[1].kill()
    run.finish()
    assert "resuming after step" in run.text() and same_bits(run, undisturbed)
    steps = [line["step"] for line in run.metrics() if "loss" in line]
    assert steps == sorted(set(steps)), "no step is in metrics.jsonl twice"


def test_a_run_killed_between_its_last_evaluation_and_its_summary_writes_that(tmp_path):
    run = Run(tmp_path, "data.length=160").finish()
    summary = run.out / "summary.json"
    accuracy = json.loads(summary.read_text())["test_accuracy"]
    summary.unlink()
    Run(tmp_path, "data.length=160", restarts=0).finish()
    assert json.loads(summary.read_text())["test_accuracy"] == accuracy


def test_a_run_stopped_by_sigterm_goes_on_with_another_number_of_processes(tmp_path, single):
    run = Run(tmp_path, "train.checkpoint_every=10")
    run.wait_for_step(10)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() != 0
    assert "stopped by SIGTERM; saved the checkpoint of step" in run.text()
    again = Run(tmp_path, processes=0).finish()
    assert "resuming after step" in again.text()
    theirs = single.weights()
    for name, tensor in again.weights().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)


def test_a_rank_that_hangs_ends_the_run_with_a_sentence(tmp_path):
    run = Run(tmp_path, "train.process_timeout=3", "train.checkpoint_every=10", restarts=0)
    run.wait_for_step(10)
    stopped = run.ranks()[1]
    stopped.suspend()
    run.wait_for(lambda: "error: rank 0 lost another process" in run.text())
    stopped.kill()  # else torchrun waits 30 seconds for it
    assert run.wait() == 1 and "train.process_timeout=3 seconds" in run.text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_after_kills_at_20_random_steps_the_weights_are_the_same_to_the_last_bit(tmp_path, undisturbed):
    chance = random.Random(0)
    for number in range(20):
        run = Run(tmp_path / str(number), "train.checkpoint_every=5")
        for _ in range(chance.choice([1, 1, 2])):
            run.wait_for_step(chance.randrange(5, 190))
            ranks = run.ranks()
            for rank in ranks if chance.random() < 0.3 else ranks[-chance.randrange(2) :][:1]:
                rank.kill()
        run.finish()
        assert same_bits(run, undisturbed), number


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_stopped_at_20_random_moments_a_run_goes_on_to_the_same_bits(tmp_path, undisturbed):
    chance, seconds = random.Random(1), []
    for number in range(20):
        run = Run(tmp_path / str(number))
        time.sleep(chance.uniform(1, 12))  # a random moment, not a moment at which something has happened
        sent = time.monotonic()
        os.kill(run.process.pid, chance.choice([signal.SIGTERM, signal.SIGINT]))
        run.wait()
        seconds.append(time.monotonic() - sent)
        assert same_bits(Run(tmp_path / str(number)).finish(), undisturbed), number
    print(f"from the signal to the exit: at most {max(seconds):.1f} s")
