"""The real loggers, without a network: what they have kept is read back from their files."""

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")
pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")

import wandb
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from extras.loggers.mlflow import MLflow
from tests.configs import metrics
from train import run
from training.config import ROOT, checked
from training.launch import Extras

SMALL = "data=synthetic data.length=128 data.test_length=64 data.image_size=8 train.batch_size=32 train.epochs=1"
SMALL += " model=linear callbacks/standard=[best] loader=torch loader.num_workers=0"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    wandb.teardown()  # else its threads are left


class Odd:
    def on_step(self, run):
        run.log(**{"acc@1": 0.5})


def composed(*overrides: str):
    Plugins.instance().register(Extras)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def in_mlflow(folder: Path):
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (found,) = client.search_runs(["0"])
    return found, lambda key: {one.step: one.value for one in client.get_metric_history(found.info.run_id, key)}


@pytest.mark.timeout(300)  # mlflow makes its tables
def test_a_run_logs_what_metrics_jsonl_has_and_the_summary_to_all_of_them(tmp_path, caplog):
    odd = f"+callbacks.odd._target_={__name__.rpartition('.')[2]}.Odd"
    summary = run(composed(*SMALL.split(), "logger=[tensorboard,wandb,mlflow]", odd), tmp_path)
    found, history = in_mlflow(tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    for key in ("loss", "images_per_second", "test_accuracy"):
        expected = {line["step"]: line[key] for line in metrics(tmp_path) if key in line}
        assert expected and history(key) == pytest.approx(expected)
        assert {event.step: event.value for event in events.Scalars(key)} == pytest.approx(expected)
    assert found.info.status == "FINISHED" and found.data.params["data.length"] == "128"
    assert found.data.metrics["summary/images_per_second"] == pytest.approx(summary["images_per_second"])
    ((_, rate),) = [(event.step, event.value) for event in events.Scalars("summary/images_per_second")]
    assert rate == pytest.approx(summary["images_per_second"])
    (offline,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert offline.stat().st_size > 0 and (tmp_path / "wandb_run_id.txt").read_text().strip() in offline.name
    refusals = [one.getMessage() for one in caplog.records if "refuses" in one.getMessage()]
    assert [text.partition(",")[0] for text in refusals] == ["logger=mlflow refuses acc@1"]
    assert [event.value for event in events.Scalars("acc@1")], "tensorboard takes it"


@pytest.mark.timeout(300)
def test_two_jobs_of_a_sweep_that_begin_at_once_share_one_database(tmp_path):
    (tmp_path / "multirun.yaml").touch()
    config = checked(composed("logger=mlflow"))
    context = multiprocessing.get_context("fork")  # which has imported mlflow
    barrier = context.Barrier(2)
    jobs = [context.Process(target=begin, args=(barrier, config, tmp_path / job)) for job in ("0", "1")]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(200)
    assert [job.exitcode for job in jobs] == [0, 0]
    found = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["0"], f"tags.sweep = '{tmp_path.name}'")
    assert {one.info.run_name for one in found} == {f"{tmp_path.name}/0", f"{tmp_path.name}/1"}
    assert {json.loads(one.data.params["seed"]) for one in found} == {0}


def begin(barrier, config, folder: Path) -> None:
    folder.mkdir()
    logger, run = (
        MLflow(),
        SimpleNamespace(folder=folder, config=config, is_main=True, trainer=SimpleNamespace(step=0)),
    )
    barrier.wait(100)
    logger.on_start(run)
    logger.on_end(run, {"test_accuracy": 0.5})
