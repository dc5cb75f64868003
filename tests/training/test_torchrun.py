"""Runs of two processes against the same run in one; torchrun restarts them. Most of these tests are slow."""

import os
import signal
import time
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
        end = time.monotonic() + LONG
        while not any(int(path.stem[5:]) >= step for path in self.out.glob("checkpoints/step-*.pt")):
            assert time.monotonic() < end and all(one.poll() is None for one in self.programs), self.text()
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


KILLS = [pytest.param(step, rank, marks=pytest.mark.slow) for step in (10, 30) for rank in (0, 1)]


@pytest.mark.parametrize(("step", "rank"), [(20, 1), *KILLS])
def test_after_a_rank_was_killed_torchrun_restarts_the_run_and_it_ends_with_the_same_bits(
    python, tmp_path, undisturbed, step, rank
):
    run = Run(python, tmp_path, "train.checkpoint_every=5", torchrun=True)
    run.wait_for_step(step)
    run.ranks()[rank].kill()
    run.finish()
    assert "resum" in run.text()
    assert differences(checkpoint(run.out)["model"], checkpoint(undisturbed.out)["model"]) == []
    assert untimed(run.out) == untimed(undisturbed.out)


UNUSED = f"model._target_={DOORS}.Unused"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        [*TWO_PARTS, f"trainer._target_={DOORS}.Alternating"],  # two optimizers
        [UNUSED, "train.max_steps=3", "train.find_unused_parameters=true"],
        ["train.accumulate=2"],
    ],
)
def test_other_steps_are_the_same_in_two_processes_too(python, tmp_path, settings):
    assert_close(*(Run(python, tmp_path / f"{n}", *settings, processes=n).finish() for n in (1, 2)))


@pytest.mark.slow
def test_batches_of_a_batch_sampler_are_shared(python, tmp_path):
    pairs = [f"batch_sampler._target_={DOORS}.Pairs", "train.last_batch=keep", "train.batch_size=2"]
    Run(python, tmp_path, *pairs).finish()


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
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.batch_size=15", ["train.batch_size=15"]),
        (UNUSED, ["aside.weight", "train.find_unused_parameters=true"]),
    ],
)
def test_what_processes_cannot_share_is_refused(python, tmp_path, override, named):
    run = Run(python, tmp_path, override)
    assert run.wait() == [1, 1] and "Traceback" not in run.text() and all(name in run.text() for name in named)


@pytest.mark.slow
def test_a_static_rendezvous_does_not_take_over_an_earlier_run(python, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # what torchrun --master-addr gives to every run
    for number in (1, 2):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_x/none_{number}/attempt_0/0/error.json")
        run = Run(python, tmp_path, "train.max_steps=2", "hydra.run.dir=", "train.resume=auto").finish()
        assert len(list((tmp_path / "outputs").iterdir())) == number and "resum" not in run.text()
