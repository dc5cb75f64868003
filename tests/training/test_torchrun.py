"""Runs of several processes against the same run in one process; torchrun restarts them."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from python_server import PythonServer
from torch.distributed import TCPStore

from tests.configs import NO_TRIALS
from tests.training.test_resume import differences, numbers, state
from training.config import ConfigError
from training.processes import meet, start_processes

ROOT = Path(__file__).resolve().parents[2]
LONG = 150  # seconds within which every run has to end
DOORS = "tests.training.test_doors"
# A linear model, because batch norm takes its statistics over a process's part of a batch.
SETTINGS = [
    *("data=synthetic", "data.length=1600", "data.test_length=65", "data.image_size=8", "model=linear"),
    *("train.batch_size=16", "train.epochs=2", "train.log_interval=10", "loader.num_workers=1", "optim.lr=0.01"),
    *(f"task.metrics={{worst: {{_target_: {DOORS}.Confusion}}}}", "task.metric=worst", *NO_TRIALS),
]
TWO_OPTIMIZERS = [f"trainer._target_={DOORS}.Alternating", f"model._target_={DOORS}.TwoParts", "~model.size"]
# torchrun, whose processes are forked: torchrun starts interpreters, and each takes seconds to import torch.
TORCHRUN = """
import os, runpy, sys
from torch.distributed import run

def rank(_, script, *arguments):
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise

def forking(config, entrypoint, launch=run.elastic_launch):
    config.start_method = "fork"
    return launch(config, rank)

run.elastic_launch = forking
run.main()
"""


class Run:
    """A run in `folder`/out, of one process or of several.

    The tests start several processes as torchrun does; `torchrun=True` starts torchrun, which restarts them.
    """

    def __init__(
        self, python: PythonServer, folder: Path, *overrides: str, processes: int = 2, torchrun: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self._torchrun = folder / "out", torchrun
        self._output = (folder / "output.txt").open("a+")
        command = [ROOT / "train.py", f"hydra.run.dir={self.out}", *SETTINGS, *overrides]
        ranks = [{"OMP_NUM_THREADS": "1"}]
        if torchrun:
            limits = [f"--nproc-per-node={processes}", "--max-restarts=3", "--monitor-interval=0.1"]
            command = ["-c", TORCHRUN, *limits, *command]
        elif processes > 1:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            about = {"MASTER_ADDR": "localhost", "MASTER_PORT": self._store.port, "WORLD_SIZE": processes}
            about |= {"LOCAL_WORLD_SIZE": processes, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "1"}
            ranks = [{**ranks[0], **about, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
        self.programs = [
            python.start(
                *command,
                cwd=folder,
                env={**os.environ, **{name: str(value) for name, value in rank.items()}},
                output=self._output,
                quick_exit=True,
            )
            for rank in ranks
        ]

    def ranks(self) -> list[psutil.Process]:
        """The processes by rank, or as many as there are at the moment."""
        try:
            if not self._torchrun:
                return [psutil.Process(program.pid) for program in self.programs]
            return sorted(psutil.Process(self.programs[0].pid).children(), key=psutil.Process.create_time)
        except psutil.Error:
            return []

    def wait_for_step(self, step: int) -> None:
        """Waits until the checkpoint of a step from `step` on is there."""
        checkpoints = self.out / "checkpoints"
        self.wait_for(lambda: any(int(path.stem[5:]) >= step for path in checkpoints.glob("step-*.pt")))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while True:
            over = any(program.poll() is not None for program in self.programs)
            if condition():
                return
            assert not over and time.monotonic() < end, self.text()
            time.sleep(0.002)

    def text(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def send_signal(self, number: int) -> None:
        for program in self.programs:
            program.send_signal(number)

    def wait(self) -> list[int]:
        """The exit codes."""
        try:
            return [program.wait(LONG) for program in self.programs]
        except subprocess.TimeoutExpired:
            for program in self.programs:
                program.kill()
            pytest.fail(f"the run did not end: {self.text()}")

    def finish(self) -> "Run":
        assert not any(self.wait()), self.text()
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.out / "checkpoints" / "last.pt", weights_only=True)["model"]

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]


def assert_close(one: Run, other: Run) -> None:
    theirs = other.weights()
    for name, tensor in one.weights().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)


def same_bits(one: Run, other: Run) -> bool:
    theirs = other.weights()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.weights().items())


@pytest.fixture(scope="module")
def undisturbed(python, tmp_path_factory) -> Run:
    """A run of two processes that nothing interrupts."""
    return Run(python, tmp_path_factory.mktemp("undisturbed"), *[text + ".1" for text in NO_TRIALS]).finish()


@pytest.fixture(scope="module")
def single(python, tmp_path_factory) -> Run:
    return Run(python, tmp_path_factory.mktemp("single"), processes=1).finish()


def test_two_processes_train_as_one_does_with_the_same_batches(undisturbed, single):
    ours, theirs = undisturbed.metrics(), single.metrics()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["step"] == other["step"] and mine.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-5)
        for score in ("test_accuracy", "test_worst"):
            assert mine.get(score) == other.get(score), "65 test samples, each counted once"
    assert_close(undisturbed, single)


@pytest.mark.parametrize("trainer", ["Alternating", "Sometimes", "OneByHand"])
def test_a_step_with_two_optimizers_is_the_same_in_two_processes(python, tmp_path, trainer):
    settings = [*TWO_OPTIMIZERS[1:], f"trainer._target_={DOORS}.{trainer}", "+model.dropout=0.0", "data.length=160"]
    assert_close(*(Run(python, tmp_path / f"{n}", *settings, "train.epochs=1", processes=n).finish() for n in (1, 2)))


def test_what_only_some_processes_train_and_buffers_beside_the_network_are_the_same_in_all(python, tmp_path):
    settings = [f"trainer._target_={DOORS}.EachItsOwn", *TWO_OPTIMIZERS[1:], "data.length=160", "data.test_length=32"]
    Run(python, tmp_path, *settings).finish()


def test_several_processes_write_one_folder_and_one_log(undisturbed):
    summary = json.loads((undisturbed.out / "summary.json").read_text())
    assert summary["processes"] == 2 and summary["batch_size"] == 16
    assert {path.name for path in undisturbed.out.parent.iterdir()} == {"out", "output.txt"}
    log = (undisturbed.out / "train.log").read_text()
    assert log.count("epoch 2: test_loss") == 1 == undisturbed.text().count("epoch 2: test_loss")


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
    config = SimpleNamespace(device="cuda", train=SimpleNamespace(batch_size=16, sync_batchnorm=False))
    with pytest.raises(ConfigError, match=r"2 processes on this machine, which has 1 GPUs?: .*--nproc-per-node=gpu"):
        start_processes(config)


def test_processes_that_are_started_again_meet_though_the_store_has_the_requests_of_an_earlier_start():
    store, limit = torch.distributed.HashStore(), timedelta(seconds=60)
    store.set("request/1", "from a process that has exited before rank 0 answered it")
    with ThreadPoolExecutor(3) as threads:
        names = [set(threads.map(lambda rank: meet(store, rank, 3, limit), range(3))) for _ in range(3)]
    assert all(len(one) == 1 for one in names) and len(set.union(*names)) == 3
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not connect"):
        meet(torch.distributed.HashStore(), 0, 3, timedelta(seconds=0))


def test_after_a_rank_was_killed_the_run_goes_on_to_the_same_weights(python, tmp_path, undisturbed):
    run = Run(python, tmp_path, "train.checkpoint_every=10", torchrun=True)
    run.wait_for_step(30)
    run.ranks()[1].kill()
    run.finish()
    assert "resuming after step" in run.text() and differences(state(run.out), state(undisturbed.out)) == []
    assert numbers(run.out) == numbers(undisturbed.out)


def test_a_run_stopped_by_sigterm_goes_on_with_another_number_of_processes(python, tmp_path, single):
    run = Run(python, tmp_path, "train.checkpoint_every=10")
    run.wait_for_step(10)
    run.send_signal(signal.SIGTERM)
    assert all(run.wait())
    assert "stopped by SIGTERM; saved the checkpoint of step" in run.text()
    again = Run(python, tmp_path, processes=1).finish()
    assert "resuming after step" in again.text()
    assert_close(again, single)


def test_ranks_with_different_numbers_of_batches_are_refused_before_they_wait_for_one_another(python, tmp_path):
    run = Run(python, tmp_path, f"batch_sampler._target_={DOORS}.Uneven", "train.last_batch=keep")
    assert all(run.wait())
    assert "error: batch_sampler: an epoch has 800, 799 batches in the processes of rank 0, 1, ...: give" in run.text()


def test_a_rank_that_hangs_ends_the_run_with_a_sentence(python, tmp_path):
    run = Run(python, tmp_path, "train.process_timeout=3", "train.checkpoint_every=10")
    run.wait_for_step(10)
    stopped = run.ranks()[1]
    stopped.suspend()
    run.wait_for(lambda: "error: rank 0 lost another process" in run.text())
    stopped.kill()
    assert run.wait()[0] == 1 and "train.process_timeout=3 seconds" in run.text()
