import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from tests.configs import composed
from tests.training.callbacks.loggers.logged_run import LoggedRun
from training.callbacks.loggers import logger as base
from training.config import ConfigError, checked
from training.run import build_callbacks

module = pytest.importorskip("training.callbacks.loggers.wandb", reason="a fork may have deleted it")

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
    pytest.importorskip(f"training.callbacks.loggers.{name}")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"logger={name} needs {name}, .*: pip install {name}"):
        build_callbacks(config(f"logger={name}"))
    assert not any(isinstance(one, base.Logger) for one in build_callbacks(config()).values())


@pytest.mark.parametrize("at", ["start", "metrics", "finish"])
def test_a_logger_that_fails_is_left_out_with_one_warning(tmp_path, monkeypatch, wandb, caplog, at):
    def method(name: str):
        def call(*_) -> None:
            if name == at:
                raise OSError(f"the network is down at the {at}")

        return call

    class Failing(base.Logger):
        package = "wandb"
        start, metrics, finish = map(method, ("start", "metrics", "finish"))

    monkeypatch.setattr(module, "WandB", Failing)
    with caplog.at_level(logging.WARNING):
        run = LoggedRun(tmp_path, config("logger=wandb"))
        for step in (1, 2):
            run.log(step=step, loss=0.5)
        run.end(test_accuracy=0.5)
    assert [message.getMessage() for message in caplog.records] == [
        f"logger=failing failed and is left out from here on: OSError: the network is down at the {at}"
    ]


def test_without_a_login_wandb_stays_offline_and_asks_nothing(tmp_path, monkeypatch, wandb, caplog):
    LoggedRun(tmp_path, config("logger=wandb"))
    assert wandb.login == [{"prompt": False, "verify": False}]
    assert wandb.init["mode"] == "offline"
    assert f"`wandb sync {tmp_path}/wandb/offline-run-*`" in caplog.text
    monkeypatch.setitem(os.environ, "WANDB_MODE", "online")
    wandb.init.clear()
    LoggedRun(tmp_path, config("logger=wandb"))
    assert "mode" not in wandb.init, "wandb reads WANDB_MODE itself"


def test_a_resumed_run_continues_its_own_and_a_new_run_in_its_folder_does_not(tmp_path, wandb):
    ids = []
    for step in (0, 5, 0):
        LoggedRun(tmp_path, config("logger=wandb"), step)
        ids.append(wandb.init["id"])
    assert ids[0] == ids[1] != ids[2]


def test_the_logger_is_told_that_a_run_without_a_summary_has_failed(tmp_path, wandb):
    LoggedRun(tmp_path, config("logger=wandb")).end()
    LoggedRun(tmp_path, config("logger=wandb")).end(test_accuracy=0.5)
    assert wandb.exit_codes == [1, 0]
    assert wandb.summary["test_accuracy"] == 0.5


def test_only_the_process_that_writes_logs(tmp_path, wandb):
    for is_main in (False, True):
        LoggedRun(tmp_path, config("logger=wandb"), is_main=is_main).log(**LINE)
        assert wandb.logged == [LINE] * is_main
