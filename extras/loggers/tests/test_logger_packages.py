"""The real loggers, without a network: what they have kept is read back from their files."""

import json
import multiprocessing
import shutil
import struct
from pathlib import Path

import pytest

tensorboard = pytest.importorskip("tensorboard")
wandb = pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
for name in ("tensorboard", "wandb", "mlflow"):
    pytest.importorskip(f"training.callbacks.loggers.{name}", reason="a fork may have deleted it")

from hydra import compose, initialize_config_dir
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record as WandBRecord

from tests.training.callbacks.loggers.logged_run import LoggedRun
from train import CONF, run
from training.config import checked

SMALL = "data=synthetic data.length=128 data.test_length=64 data.image_size=8 train.batch_size=32 train.epochs=1"
ALL = "logger=[tensorboard,wandb,mlflow]"
Points = list[tuple[int, float]]  # (step, value)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    wandb.teardown()  # else its threads are left


@pytest.fixture(scope="session")
def database(tmp_path_factory) -> Path:
    """One without runs: making its tables takes MLflow most of a test's time."""
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_runs(["0"])
    return file


def composed(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def in_tensorboard(folder: Path, key: str) -> Points:
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]


def in_mlflow(folder: Path, key: str) -> Points:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (found,) = client.search_runs(["0"])
    points = client.get_metric_history(found.info.run_id, key)
    return sorted((metric.step, metric.value) for metric in points)


def in_wandb(folder: Path, key: str) -> Points:
    rows = [record.history.item for record in wandb_records(folder) if record.HasField("history")]
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row} for row in rows]
    return [(row["step"], row[key]) for row in rows if key in row]


def wandb_records(folder: Path) -> list[WandBRecord]:
    """All that wandb has written to its files, oldest first: records in LevelDB's log format, after 7 bytes."""
    wandb.teardown()  # waits for its own process, which writes them
    records = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, body = file.read_bytes(), 7, b""
        while at < len(data):
            if (left := 32768 - at % 32768) < 7:  # the end of a block, too short for a record
                at += left
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            body += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                records.append(WandBRecord.FromString(body))
                body = b""
    return records


def test_a_run_with_workers_logs_what_metrics_jsonl_has_to_all_of_them(tmp_path):
    summary = run(composed(*SMALL.split(), ALL, "loader=prefetch", "loader.num_workers=2"), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    for key in ("loss", "images_per_second", "data_wait_fraction", "test_accuracy"):
        expected = {line["step"]: line[key] for line in lines if key in line}
        assert expected
        for read in (in_tensorboard, in_mlflow, in_wandb):
            assert dict(read(tmp_path, key)) == pytest.approx(expected), (read.__name__, key)

    (found,) = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["0"])
    assert found.info.status == "FINISHED"
    assert found.data.params["loader.num_workers"] == "2"
    assert found.data.metrics["summary/images_per_second"] == pytest.approx(summary["images_per_second"])
    ((_, rate),) = in_tensorboard(tmp_path, "summary/images_per_second")
    assert rate == pytest.approx(summary["images_per_second"])
    assert "_hparams_/session_start_info" in EventAccumulator(str(tmp_path)).Reload().summary_metadata
    records = wandb_records(tmp_path)
    (config,) = (record.run.config.update for record in records if record.HasField("run"))
    settings = {item.key: json.loads(item.value_json) for item in config}
    assert settings["loader"]["num_workers"] == 2
    updates = [item for record in records if record.HasField("summary") for item in record.summary.update]
    assert json.loads([item for item in updates if item.key == "verdict"][-1].value_json) == summary["verdict"]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def test_a_resumed_run_continues_where_its_checkpoint_was_in_all_of_them(tmp_path, database):
    shutil.copy(database, tmp_path)
    config = checked(composed(ALL))
    for begin, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        logged = LoggedRun(tmp_path, config, begin)
        for step in steps:
            logged.log(step=step, loss=begin + step / 8)
        logged.end(**({} if begin == 0 else {"test_accuracy": 0.5}))
    expected = [(1, 1 / 8), (2, 2 / 8), (3, 2 + 3 / 8), (4, 2 + 4 / 8), (5, 2 + 5 / 8)]
    assert in_tensorboard(tmp_path, "loss") == expected
    both = [(1, 1 / 8), (2, 2 / 8), (3, 3 / 8), (4, 4 / 8), *expected[2:]]  # these two remove nothing
    assert in_mlflow(tmp_path, "loss") == sorted(both)
    assert in_wandb(tmp_path, "loss") == both
    assert len({record.run.run_id for record in wandb_records(tmp_path) if record.HasField("run")}) == 1


def test_the_runs_of_a_sweep_are_together_in_each_of_them(tmp_path, database):
    shutil.copy(database, tmp_path)
    (tmp_path / "multirun.yaml").touch()
    for job in ("0", "1"):
        logged = LoggedRun(tmp_path / job, checked(composed(ALL)))
        logged.log(step=1, loss=float(job))
        logged.end()
        assert in_tensorboard(tmp_path / job, "loss") == [(1, float(job))]
        (group,) = (record.run.run_group for record in wandb_records(tmp_path / job) if record.HasField("run"))
        assert group == tmp_path.name
    found = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["0"], f"tags.sweep = '{tmp_path.name}'")
    assert sorted(one.data.metrics["loss"] for one in found) == [0.0, 1.0]
    assert {one.info.status for one in found} == {"FAILED"}, "they ended without a summary"


def test_two_jobs_of_a_sweep_that_begin_at_once_share_one_database(tmp_path):
    (tmp_path / "multirun.yaml").touch()
    context = multiprocessing.get_context("fork")  # which has imported mlflow
    barrier = context.Barrier(2)
    jobs = [context.Process(target=begin, args=(barrier, tmp_path / job)) for job in ("0", "1")]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0]
    found = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["0"])
    assert {one.info.run_name for one in found} == {f"{tmp_path.name}/0", f"{tmp_path.name}/1"}


def begin(barrier, folder: Path) -> None:
    config = checked(composed("logger=mlflow"))
    barrier.wait(30)
    LoggedRun(folder, config).end(test_accuracy=0.5)
