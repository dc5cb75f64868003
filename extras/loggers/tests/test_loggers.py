"""What the loggers share: one that fails does not stop training; resumed runs; sweeps."""

import logging
import sys
from importlib import import_module

import pytest

from extras.loggers.logger import Logger
from tests.configs import train
from training.config import ConfigError

HERE = __name__.rpartition(".")[2]
RECORDER = f"+callbacks.recorder={{_target_: {HERE}.Recorder, fails_at: %s}}"
SMALL = ("model=linear", "train.epochs=1", "loader.num_workers=0")


class Recorder(Logger):
    """Keeps what it is told, and fails at one of its methods."""

    package = "json"
    made: "Recorder"

    def __init__(self, fails_at: str = "nothing") -> None:
        super().__init__(fails_at=fails_at)
        Recorder.made, self.calls = self, []

    def _note(self, name, *values):
        self.calls.append((name, *values))
        if self.options["fails_at"] == name:
            raise OSError(f"the network is down\nat the {name}")

    def start(self, run):
        self._note("start", run.trainer.step, self.earlier_id)
        self.save_id("id")

    def metrics(self, step, values):
        self._note("metrics", step, values)

    def finish(self, summary):
        self._note("finish", summary)


def test_a_logger_gets_the_lines_of_metrics_jsonl_and_the_summary_and_a_job_of_a_sweep_continues_its_own(tmp_path):
    (tmp_path / "multirun.yaml").touch()
    summary = train(tmp_path / "1", RECORDER % "nothing", *SMALL)
    (start, *lines, finish), recorder = Recorder.made.calls, Recorder.made
    assert start == ("start", 0, None) and finish[1]["test_accuracy"] == summary["test_accuracy"]
    steps = [step for _, step, _ in lines]
    assert steps == sorted(steps) and "loss" in lines[0][2] and "step" not in lines[0][2]
    assert (recorder.sweep, recorder.run_name) == (tmp_path, f"{tmp_path.name}/1")
    train(tmp_path / "1", RECORDER % "nothing", *SMALL, "train.epochs=2")
    assert Recorder.made.calls[0] == ("start", 8, "id")


@pytest.mark.parametrize("at", ["start", "metrics", "finish"])
def test_a_logger_that_fails_is_left_out_with_one_warning(tmp_path, caplog, at):
    with caplog.at_level(logging.WARNING):
        train(tmp_path, RECORDER % at, *SMALL)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("logger=")]
    assert said == [f"logger=recorder failed and is left out from here on: OSError: the network is down at the {at}"]
    assert Recorder.made.calls[-1][0] == at


@pytest.mark.parametrize("name", ["TensorBoard", "WandB", "MLflow"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name.lower(), None)
    kind = getattr(import_module(f"extras.loggers.{name.lower()}"), name)
    with pytest.raises(ConfigError, match=f"logger={name.lower()} needs another package: pip install {name.lower()}"):
        kind()
