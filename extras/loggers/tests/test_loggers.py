"""What the loggers share: one that fails, or refuses a value, does not stop training; resumed runs; sweeps."""

import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from extras.loggers.logger import Logger
from extras.loggers.wandb import WandB
from tests.configs import train
from training.config import ConfigError

HERE = __name__.rpartition(".")[2]
RECORDER = f"+callbacks.recorder={{_target_: {HERE}.Recorder, fails_at: %s}}"


class Recorder(Logger):
    """Keeps what it is told, and fails at one of its methods, or refuses the name that contains an @."""

    package = "json"
    made: "Recorder"

    def __init__(self, fails_at: str = "nothing") -> None:
        super().__init__(fails_at=fails_at)
        Recorder.made, self.calls = self, []

    def _call(self, name, *values):
        self.calls.append((name, *values))
        if self.options["fails_at"] == name:
            raise OSError(f"the network is down\nat the {name}")

    def start(self, run):
        self._call("start", run.trainer.step)

    def metrics(self, step, values):
        self._call("metrics", step, values)
        if any("@" in name for name in values):
            raise ValueError("only letters, please")

    def finish(self, summary):
        self._call("finish", summary)
        if self.options["fails_at"] == "summary":
            self.send(0, {"fine": 1.0, "top@5": 2.0})
            self.calls.append("closed")


class Odd:
    """Logs a name that the logger refuses."""

    def on_step(self, run):
        run.log(**{"acc@1": 0.5})


SMALL = ("model=linear", "train.epochs=1", "loader.num_workers=0")


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("logger=")]


def test_a_logger_gets_the_lines_of_metrics_jsonl_and_the_summary(tmp_path):
    summary = train(tmp_path, RECORDER % "nothing", *SMALL)
    (start, *lines, finish), recorder = Recorder.made.calls, Recorder.made
    assert start == ("start", 0) and finish[1]["test_accuracy"] == summary["test_accuracy"]
    assert [step for _, step, _ in lines] == sorted(step for _, step, _ in lines) and "loss" in lines[0][2]
    assert "step" not in lines[0][2] and recorder.run_name == tmp_path.name and recorder.sweep is None


@pytest.mark.parametrize("at", ["start", "metrics", "finish"])
def test_a_logger_that_fails_is_left_out_with_one_warning(tmp_path, caplog, at):
    with caplog.at_level(logging.WARNING):
        train(tmp_path, RECORDER % at, *SMALL)
    sentence = f"logger=recorder failed and is left out from here on: OSError: the network is down at the {at}"
    assert warnings_of(caplog) == [sentence]
    if at == "start":
        assert Recorder.made.calls == [("start", 0)]


def test_a_value_that_is_refused_is_left_out_alone_with_one_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(tmp_path, f"+callbacks.odd._target_={HERE}.Odd", RECORDER % "nothing", *SMALL)
    (warning,) = warnings_of(caplog)
    assert warning.startswith("logger=recorder refuses acc@1, which is left out from here on: ValueError: only")
    later = [call[2] for call in Recorder.made.calls if call[0] == "metrics"][-2]
    assert "loss" in later and "acc@1" not in later and Recorder.made.calls[-1][0] == "finish"


def test_a_number_of_the_summary_that_is_refused_does_not_keep_the_logger_from_closing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(tmp_path, RECORDER % "summary", *SMALL)
    assert Recorder.made.calls[-1] == "closed" and "refuses top@5" in caplog.text


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    module = __import__(f"extras.loggers.{name}", fromlist=["x"])
    kind = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow"}[name]
    with pytest.raises(ConfigError, match=rf"logger={name} needs another package: pip install {name}"):
        getattr(module, kind)()


@pytest.fixture
def wandb(monkeypatch) -> SimpleNamespace:
    """A module in place of wandb, without a login; remembers the arguments of wandb.init, and the run's calls."""
    seen = SimpleNamespace(init={}, logged=[], summary={}, exit_codes=[], login=[])
    run = SimpleNamespace(define_metric=lambda *_, **__: None, log=seen.logged.append, summary=seen.summary)
    run.finish = lambda exit_code: seen.exit_codes.append(exit_code)
    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.login = lambda **options: bool(seen.login.append(options))
    module.Settings = dict
    module.init = lambda **options: seen.init.update(options) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return seen


WANDB = f"+callbacks.wandb={{_target_: {WandB.__module__}.WandB}}"


def test_without_a_login_wandb_stays_offline_and_asks_nothing(tmp_path, monkeypatch, wandb, caplog):
    train(tmp_path / "first", WANDB, *SMALL)
    assert wandb.login == [{"prompt": False, "verify": False}] and wandb.init["mode"] == "offline"
    assert f"`wandb sync {tmp_path / 'first'}/wandb/offline-run-*`" in caplog.text and wandb.exit_codes == [0]
    monkeypatch.setitem(os.environ, "WANDB_MODE", "online")
    wandb.init.clear()
    train(tmp_path / "second", WANDB, *SMALL)
    assert "mode" not in wandb.init, "wandb reads WANDB_MODE itself"


def test_a_resumed_run_continues_its_own_and_the_jobs_of_a_sweep_are_a_group(tmp_path, wandb):
    (tmp_path / "multirun.yaml").touch()
    ids = []
    for steps in (8, 16):
        train(tmp_path / "0", WANDB, *SMALL, f"train.epochs={steps // 8}")
        ids.append(wandb.init["id"])
    train(tmp_path / "1", WANDB, *SMALL)
    assert ids[0] == ids[1] != wandb.init["id"]
    assert wandb.init["group"] == tmp_path.name and wandb.init["name"] == f"{tmp_path.name}/1"
