"""The real loggers, without a network: what they have kept is read back from their files."""

import multiprocessing
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins

from tests.configs import SMALL, metrics
from tests.later import Later
from train import run
from training.config import ROOT, checked
from training.launch import Extras

wandb, mlflow, mlflows = Later("wandb"), Later("mlflow.tracking"), Later("extras.loggers.mlflow")
events = Later("tensorboard.backend.event_processing.event_accumulator")
SMALLER = [*SMALL, "data.length=128", "model=linear", "callbacks/standard=[best]"]


def needs(*packages: str):
    return pytest.mark.skipif(not all(map(find_spec, packages)), reason=f"needs {', '.join(packages)}")


class Odd:
    def on_step(self, run):
        run.log(**{"acc@1": 0.5})


def composed(*overrides: str):
    Plugins.instance().register(Extras)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def numbers_of(folder, key):
    return pytest.approx({line["step"]: line[key] for line in metrics(folder) if key in line})


@needs("tensorboard")
def test_tensorboard_has_the_lines_of_metrics_jsonl_and_the_summary(tmp_path):
    summary = run(composed(*SMALLER, "logger=tensorboard"), tmp_path)
    found = events.EventAccumulator(str(tmp_path)).Reload()
    for key in ("loss", "images_per_second", "test_accuracy"):
        assert {event.step: event.value for event in found.Scalars(key)} == numbers_of(tmp_path, key), key
    (speed,) = found.Scalars("summary/images_per_second")
    assert speed.value == pytest.approx(summary["images_per_second"])


@needs("wandb", "mlflow", "sqlalchemy")
@pytest.mark.slow
@pytest.mark.timeout(300)  # mlflow makes its tables
def test_a_resumed_run_without_a_login_continues_in_wandbs_and_mlflows_files(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NETRC", str(tmp_path / "nobody"))
    odd = f"+callbacks.odd._target_={__name__.rpartition('.')[2]}.Odd"
    for epochs in (1, 2):
        summary = run(composed(*SMALLER, "logger=[wandb,mlflow]", odd, f"train.epochs={epochs}"), tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs(["0"])
    for key in ("loss", "test_accuracy"):
        history = client.get_metric_history(found.info.run_id, key)
        assert {one.step: one.value for one in history} == numbers_of(tmp_path, key), key
    assert found.info.status == "FINISHED" and found.data.params["data.length"] == "128"
    assert found.data.metrics["summary/images_per_second"] == pytest.approx(summary["images_per_second"])
    assert found.data.metrics["acc_1"] == 0.5, "mlflow refuses acc@1"
    offline = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert all((tmp_path / "wandb_run_id.txt").read_text().strip() in one.name for one in offline)
    assert f"`wandb sync {tmp_path}/wandb/offline-run-*`" in caplog.text and "left out" not in caplog.text
    wandb.teardown()  # else its threads are left


@needs("mlflow", "sqlalchemy")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_jobs_of_a_sweep_that_begin_at_once_share_one_database(tmp_path):
    (tmp_path / "multirun.yaml").touch()
    config, context = checked(composed("logger=mlflow")), multiprocessing.get_context("fork")
    barrier = context.Barrier(2)

    def begin(folder) -> None:
        folder.mkdir()
        logger, trainer = mlflows.MLflow(), SimpleNamespace(step=0)
        barrier.wait(100)
        logger.on_start(SimpleNamespace(folder=folder, config=config, is_main=True, trainer=trainer))
        logger.on_end(None, {"test_accuracy": 0.5})

    jobs = [context.Process(target=begin, args=(tmp_path / job,)) for job in ("0", "1")]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(200)
    found = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(
        ["0"], f"tags.sweep = '{tmp_path.name}'"
    )
    assert {one.info.run_name for one in found} == {f"{tmp_path.name}/0", f"{tmp_path.name}/1"}
