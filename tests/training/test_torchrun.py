"""Runs of two processes against the same run in one; torchrun restarts them. Most of these tests are slow."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from tests.configs import CONF, DOORS, LINEAR, SMALL, checkpoint, differences, metrics, untimed
from tests.python_server import PythonServer

LONG = 100  # seconds within which every run has to end
SETTINGS = [
    *(*SMALL, LINEAR, "train.batch_size=16", "data.length=320", "data.test_length=65", "optim.lr=0.01"),
    *(f"task.metrics={{worst: {{_target_: {DOORS}.Worst}}}}", "task.metric=worst", "loader=workers"),
]
TWO_PARTS = [f"model._target_={DOORS}.TwoParts", "+model.dropout=0.0"]
STOP = f"+callbacks.stop._target_={DOORS}.Stop"
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

    Several processes are started as torchrun starts them; `torchrun=True` starts torchrun, which restarts them.
    """

    def __init__(
        self, python: PythonServer, folder: Path, *overrides: str, processes: int = 2, torchrun: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self._torchrun = folder / "out", torchrun
        self._output = (folder / "output.txt").open("a+")
        given = {text.partition("=")[0]: text for text in (*SETTINGS, f"hydra.run.dir={self.out}", *overrides)}
        command = [CONF.parent / "train.py", *(text for text in given.values() if text != "hydra.run.dir=")]
        ranks: list[dict[str, object]] = [{}]
        if torchrun:
            limits = [f"--nproc-per-node={processes}", "--max-restarts=3", "--monitor-interval=0.1"]
            command = ["-c", TORCHRUN, *limits, *command]
        elif processes > 1:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            about = {"MASTER_ADDR": "localhost", "MASTER_PORT": self._store.port, "WORLD_SIZE": processes}
            about |= {"LOCAL_WORLD_SIZE": processes, "TORCHELASTIC_USE_AGENT_STORE": True}
            about |= {"TORCHELASTIC_RUN_ID": os.environ.get("TORCHELASTIC_RUN_ID", "1")}
            ranks = [{**about, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
        root = {"PYTHONPATH": CONF.parent, "OMP_NUM_THREADS": 1}
        environments = [{**os.environ, **{k: str(v) for k, v in {**root, **rank}.items()}} for rank in ranks]
        options = {"cwd": folder, "output": self._output, "quick_exit": True}
        self.programs = [python.start(*command, env=environment, **options) for environment in environments]

    def ranks(self) -> list[psutil.Process]:
        """The processes by rank."""
        if not self._torchrun:
            return [psutil.Process(program.pid) for program in self.programs]
        return sorted(psutil.Process(self.programs[0].pid).children(), key=psutil.Process.create_time)

    def wait_for_step(self, step: int) -> None:
        """Waits until the checkpoint of a step from `step` on is there."""
        files = self.out / "checkpoints"
        self.wait_for(lambda: any(int(path.stem[5:]) >= step for path in files.glob("step-*.pt")))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while not condition():
            over = any(program.poll() is not None for program in self.programs)
            assert (not over or condition()) and time.monotonic() < end, self.text()
            time.sleep(0.005)

    def text(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def wait(self) -> list[int]:
        """The exit codes."""
        return [program.wait(LONG) for program in self.programs]

    def finish(self) -> "Run":
        assert not any(self.wait()), self.text()
        return self


def assert_close(one: Run, other: Run) -> None:
    torch.testing.assert_close(checkpoint(one.out)["model"], checkpoint(other.out)["model"], rtol=0, atol=1e-6)
    for mine, theirs in zip(metrics(one.out), metrics(other.out), strict=True):
        assert {name: mine[name] for name in ("step", "epoch")} == {name: theirs[name] for name in ("step", "epoch")}
        for name in mine.keys() & {"loss", "accuracy", "test_loss", "test_accuracy", "test_worst"}:
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6), "each of the 65 test samples counts once"


@pytest.fixture(scope="module")
def undisturbed(python, tmp_path_factory) -> Run:
    """A run of two processes that nothing interrupts."""
    return Run(python, tmp_path_factory.mktemp("undisturbed")).finish()


@pytest.fixture(scope="module")
def single(python, tmp_path_factory) -> Run:
    return Run(python, tmp_path_factory.mktemp("single"), processes=1).finish()


def test_two_processes_train_as_one_does_and_write_one_folder_and_one_log(undisturbed, single):
    assert_close(undisturbed, single)
    assert {path.name for path in undisturbed.out.parent.iterdir()} == {"out", "output.txt"}
    log = (undisturbed.out / "train.log").read_text()
    assert log.count("epoch 2: test_loss") == 1 == undisturbed.text().count("epoch 2: test_loss")


def test_after_a_rank_was_killed_torchrun_restarts_the_run_and_it_ends_with_the_same_bits(
    python, tmp_path, undisturbed
):
    run = Run(python, tmp_path, "train.checkpoint_every=10", torchrun=True)
    run.wait_for_step(20)
    run.ranks()[1].kill()
    run.finish()
    assert "resum" in run.text()
    assert differences(checkpoint(run.out)["model"], checkpoint(undisturbed.out)["model"]) == []
    assert untimed(run.out) == untimed(undisturbed.out)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", [10, 20, 30])
def test_a_rank_may_be_killed_at_any_time(python, tmp_path, undisturbed, victim, step):
    run = Run(python, tmp_path, "train.checkpoint_every=5", "loader.num_workers=1", torchrun=True)
    run.wait_for_step(step)
    run.ranks()[victim].kill()
    run.finish()
    assert differences(checkpoint(run.out)["model"], checkpoint(undisturbed.out)["model"]) == []


@pytest.mark.slow
def test_a_step_with_two_optimizers_is_the_same_in_two_processes(python, tmp_path):
    settings = [*TWO_PARTS, f"trainer._target_={DOORS}.Alternating"]
    assert_close(*(Run(python, tmp_path / f"{n}", *settings, processes=n).finish() for n in (1, 2)))


@pytest.mark.slow
def test_weights_that_a_step_does_not_use_need_a_key_that_the_sentence_names(python, tmp_path):
    unused = [f"model._target_={DOORS}.Unused", "train.max_steps=3"]
    run = Run(python, tmp_path / "without", *unused)
    assert run.wait() == [1, 1] and "Traceback" not in run.text()
    assert "aside.weight" in run.text() and "train.find_unused_parameters=true" in run.text()
    keyed = [*unused, "train.find_unused_parameters=true"]
    assert_close(*(Run(python, tmp_path / f"{n}", *keyed, processes=n).finish() for n in (1, 2)))


@pytest.mark.slow
def test_accumulated_parts_and_a_batch_sampler_are_the_same_in_two_processes(python, tmp_path):
    assert_close(*(Run(python, tmp_path / f"{n}", "train.accumulate=2", processes=n).finish() for n in (1, 2)))
    pairs = [f"batch_sampler._target_={DOORS}.Pairs", "train.last_batch=keep", "train.batch_size=2"]
    Run(python, tmp_path / "pairs", *pairs).finish()


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_goes_on_with_another_number_of_processes(python, tmp_path, single):
    run = Run(python, tmp_path, STOP, "+callbacks.stop.at=12", "+callbacks.stop.how=SIGTERM")
    assert run.wait() == [75, 75], run.text()
    assert "SIGTERM" in run.text() and checkpoint(run.out)["step"] in (12, 13)
    again = Run(python, tmp_path, processes=1).finish()
    assert "resum" in again.text()
    torch.testing.assert_close(checkpoint(again.out)["model"], checkpoint(single.out)["model"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_processes_save_the_places_of_all_streams_and_go_on_there_with_other_workers(python, tmp_path):
    stream = [f"data._target_={DOORS}.Stream", *TWO_PARTS, "train.steps_per_epoch=12", "loader.streams=4"]
    whole = Run(python, tmp_path / "whole", *stream).finish()
    at_14 = [STOP, "+callbacks.stop.at=14", "+callbacks.stop.how=SIGTERM", "loader.num_workers=1"]
    stopped = Run(python, tmp_path / "stopped", *stream, *at_14)
    assert stopped.wait() == [75, 75], stopped.text()
    again = Run(python, tmp_path / "stopped", *stream).finish()
    assert differences(checkpoint(again.out)["model"], checkpoint(whole.out)["model"]) == []


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_a_sentence(python, tmp_path):
    run = Run(python, tmp_path, "train.process_timeout=3", "train.checkpoint_every=10", "train.epochs=100")
    run.wait_for_step(10)
    stopped = run.ranks()[1]
    stopped.suspend()
    assert run.programs[0].wait(LONG) == 1
    stopped.send_signal(signal.SIGKILL)
    assert "train.process_timeout=3 seconds" in run.text()


@pytest.mark.slow
def test_a_batch_that_processes_cannot_share_is_refused(python, tmp_path):
    run = Run(python, tmp_path, "train.batch_size=15")
    assert run.wait() == [1, 1] and "train.batch_size=15" in run.text() and "Traceback" not in run.text()


@pytest.mark.slow
def test_a_static_rendezvous_does_not_take_over_an_earlier_run(python, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # what torchrun --master-addr gives to every run
    for number in (1, 2):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_x/none_{number}/attempt_0/0/error.json")
        run = Run(python, tmp_path, "train.max_steps=2", "hydra.run.dir=", "train.resume=auto").finish()
        assert len(list((tmp_path / "outputs").iterdir())) == number and "resum" not in run.text()
