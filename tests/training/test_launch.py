import json
from pathlib import Path

import pytest
import yaml

from data.errors import DataError
from loaders import LoaderConfigError, MachineFull
from tests.configs import has_part
from training.launch import sentence_of

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"


@pytest.fixture
def train(python, tmp_path):
    """Calls train.py in the folder tmp_path, with little data."""
    small = ["data=synthetic", "data.length=64", "data.test_length=16", "data.image_size=8"]
    short = ["train.batch_size=16", "train.epochs=1", "loader.num_workers=0"]

    def run(*arguments, quick_exit=True):
        command = [ROOT / "train.py", *arguments, *small, *short]
        return python.run(*command, cwd=tmp_path, timeout=100, quick_exit=quick_exit)

    return run


def test_a_wrong_setting_ends_with_one_sentence_and_exit_code_1(train, tmp_path):
    done = train("trian.epochs=1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: trian.epochs=1: there is no key trian.epochs; did you mean train.epochs?")
    assert done.stderr.count("\n") == 1 and not done.stdout
    assert not list(tmp_path.iterdir()), "a run that did not start writes nothing"


def test_a_setting_with_dashes_is_shown_as_key_and_value(train):
    done = train("--batch-size=64")
    assert done.returncode == 2
    assert done.stderr.endswith("settings are written as key=value: python train.py train.batch_size=64\n")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"WORLD_SIZE": "2"}, "error: WORLD_SIZE=2 is set, but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start"),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "error: rank 1 of 2 could not connect to the others through MASTER_ADDR and MASTER_PORT, localhost:1, "
            "within train.process_timeout=1 seconds",
        ),
    ],
)
def test_a_start_of_several_processes_that_cannot_work_ends_with_a_sentence(
    train, tmp_path, monkeypatch, environment, sentence
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = train("train.process_timeout=1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(sentence) and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "only the main process writes files"


def test_a_run_writes_its_files_and_after_a_mistake_in_resuming_goes_on_with_its_own_settings(train, tmp_path):
    done = train("model=linear", "train.max_steps=2", "hydra.run.dir=out", quick_exit=False)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names - {"report.md"} == {"train.log", "metrics.jsonl", "summary.json", "checkpoints", ".hydra"}
    failed = train("train.resume=out", "model=small_cnn")
    assert failed.returncode == 1 and "does not fit this run's SmallCNN" in failed.stdout
    again = train("train.resume=out", "train.max_steps=3")
    assert again.returncode == 0 and "resuming after step 2" in again.stdout
    assert yaml.safe_load((tmp_path / "out" / ".hydra" / "config.yaml").read_text())["model"]["size"] == 14


def test_an_expected_error_has_a_traceback_only_on_request(python, tmp_path, monkeypatch):
    command = [ROOT / "train.py", "data=image_folder", "data.root=/no/such/folder", "hydra.run.dir=out"]
    short = python.run(*command, cwd=tmp_path, timeout=100, quick_exit=True)
    assert short.returncode == 1 and "Traceback" not in short.stdout + short.stderr
    assert "/no/such/folder" in (tmp_path / "out" / "error.txt").read_text()
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "Traceback" in python.run(*command, cwd=tmp_path, timeout=100, quick_exit=True).stderr


def test_when_a_job_of_a_sweep_fails_the_others_go_on_and_are_in_its_table(train, tmp_path):
    done = train("-m", "loader=torch,prefetch", "seed=0,-1", "hydra.sweep.dir=sweep")
    assert done.returncode == 1
    summaries = {path.parent.name for path in (tmp_path / "sweep").glob("*/summary.json")}
    errors = {path.parent.name for path in (tmp_path / "sweep").glob("*/error.txt")}
    assert (summaries, errors) == ({"0", "2"}, {"1", "3"})
    assert "seed=-1: give an integer from 0" in done.stdout
    assert json.loads((tmp_path / "sweep" / "0" / "summary.json").read_text())["loader"] == "torch"
    if has_part("sweep"):
        assert "Jobs: 2 done, 2 failed" in done.stdout and "python train.py" in done.stdout
        assert {"sweep.csv", "sweep.md", "sweep.png"} < {path.name for path in (tmp_path / "sweep").iterdir()}


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (DataError("a.jpg is truncated"), "a.jpg is truncated"),
        (
            DataError("Caught DataError in worker 0.\nTraceback:\n  ...\ndata.errors.DataError: a.jpg is truncated"),
            "a.jpg is truncated",
        ),
        (LoaderConfigError("no loader does this"), "no loader does this"),
        (WorkerFailure("timed out after 2 seconds"), "timed out after 2 seconds"),
        (MachineFull("loader=resident needs 2 GB"), "loader=resident needs 2 GB"),
        (KeyError("x"), "KeyError: 'x'"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_an_error_is_reported_in_its_own_words_in_whatever_process_it_was_raised(error, sentence):
    assert sentence_of(error) == sentence
