import json
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from tests.configs import composed
from training.callbacks.loggers import logger as loggers
from training.config import ConfigError, checked
from training.record import Record

LINE = {"step": 1, "loss": 2.0, "images_per_second": 3.0}


def config(*overrides: str):
    return checked(composed(*overrides))


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


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"^logger={name} needs {name}, .*: pip install {name}$"):
        config(f"logger={name}")
    assert config().logger == {}


def test_a_section_of_an_unknown_logger_is_refused():
    with pytest.raises(ConfigError, match=r"^logger=wand: did you mean wandb\?"):
        config("+logger.wand.project=x")


def test_a_key_that_a_logger_does_not_have_is_refused(tmp_path, monkeypatch, wandb):
    def init(*, dir: str) -> None: ...

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    with pytest.raises(ConfigError, match=r"^logger\.wandb: .*unexpected keyword"):
        Record(tmp_path, config=config("logger=wandb")).begin(0)


@pytest.mark.parametrize("at", ["start", "metrics", "finish"])
def test_a_logger_that_fails_is_left_out_with_one_warning(tmp_path, monkeypatch, wandb, caplog, at):
    class Failing:
        def __init__(self, run: loggers.Run, **options) -> None:
            self.fail("start")

        def metrics(self, step, values) -> None:
            self.fail("metrics")

        def finish(self, summary) -> None:
            self.fail("finish")

        def fail(self, where: str) -> None:
            if where == at:
                raise OSError(f"the network is down at the {at}")

    monkeypatch.setitem(loggers.CLASSES, "wandb", Failing)
    with caplog.at_level(logging.WARNING), Record(tmp_path, config=config("logger=wandb")) as record:
        record.begin(0)
        for step in (1, 2):
            record.metrics(step=step, loss=0.5)
        summary = record.finish(test_accuracy=0.5)
    assert [message.getMessage() for message in caplog.records] == [
        f"logger=wandb failed and is left out from here on: OSError: the network is down at the {at}"
    ]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2]
    assert record.earlier_summary() == summary


def test_without_a_login_wandb_stays_offline_and_asks_nothing(tmp_path, monkeypatch, wandb, caplog):
    Record(tmp_path, config=config("logger=wandb")).begin(0)
    assert wandb.login == [{"prompt": False, "verify": False}]
    assert wandb.init["mode"] == "offline"
    assert f"`wandb sync {tmp_path}/wandb/offline-run-*`" in caplog.text
    monkeypatch.setitem(os.environ, "WANDB_MODE", "online")
    wandb.init.clear()
    Record(tmp_path, config=config("logger=wandb")).begin(0)
    assert "mode" not in wandb.init, "wandb reads WANDB_MODE itself"


def test_the_runs_of_a_sweep_are_a_group(tmp_path, wandb):
    (tmp_path / "DATE").mkdir()
    (tmp_path / "DATE" / "multirun.yaml").touch()  # Hydra writes it at the start of a sweep
    Record(tmp_path / "DATE" / "3", config=config("logger=wandb")).begin(0)
    assert (wandb.init["group"], wandb.init["name"]) == ("DATE", "DATE/3")
    Record(tmp_path / "alone", config=config("logger=wandb")).begin(0)
    assert (wandb.init["group"], wandb.init["name"]) == (None, "alone")


def test_a_resumed_run_continues_its_own_and_a_new_run_in_its_folder_does_not(tmp_path, wandb):
    ids = []
    for step in (0, 5, 0):
        Record(tmp_path, config=config("logger=wandb")).begin(step)
        ids.append(wandb.init["id"])
    assert ids[0] == ids[1] != ids[2]


def test_the_logger_is_told_that_a_run_without_a_summary_has_failed(tmp_path, wandb):
    with pytest.raises(KeyboardInterrupt), Record(tmp_path, config=config("logger=wandb")) as record:
        record.begin(0)
        raise KeyboardInterrupt
    with Record(tmp_path, config=config("logger=wandb")) as record:
        record.begin(0)
        record.finish(test_accuracy=0.5)
    assert wandb.exit_codes == [1, 0]
    assert wandb.summary["test_accuracy"] == 0.5


def test_only_the_process_that_writes_logs(tmp_path, wandb):
    for writes in (False, True):
        with Record(tmp_path, writes, config("logger=wandb")) as record:
            record.begin(0)
            record.metrics(**LINE)
        assert wandb.logged == [LINE] * writes
