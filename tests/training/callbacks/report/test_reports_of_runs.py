"""The report, the verdict and the measurements of whole runs."""

import json
import os
import signal

import pytest
from torch.utils.data import default_collate

from tests.test_train import assert_equal_weights, train
from training.callbacks.report.measured import Interval
from training.callbacks.report.verdict import Verdict
from training.stopping import Stopped
from training.trainer import Trainer

REPORT = "training.callbacks.report.report"
DATA_BOUND = Verdict("reading", "data-bound", Interval.of([10.0]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    return folder


def test_a_run_reports_where_its_time_went_with_a_picture(tmp_path):
    pytest.importorskip("training.callbacks.timeline", reason="a fork may have deleted it")
    summary = train(tmp_path, "timing.timeline=16", "timing.warmup_steps=0", "loader.num_workers=2")
    assert summary["bottleneck"] and summary["verdict"]
    text = (tmp_path / "report.md").read_text()
    for part in ("set-up", "waiting for the loader", "computing", "evaluation", "the whole run", summary["verdict"]):
        assert part in text
    assert "![" in text and (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {"worker 0", "worker 1", "training loop"} <= {
        event["args"]["name"] for event in events if event["ph"] == "M"
    }


def test_what_is_measured_after_a_run_changes_nothing_that_it_saved(tmp_path, undisturbed):
    tried = train(tmp_path, "timing.trial_seconds=0.05")
    assert_equal_weights(undisturbed, tmp_path)
    assert tried["test_accuracy"] == json.loads((undisturbed / "summary.json").read_text())["test_accuracy"]


@pytest.mark.parametrize("speed, says", [(4.0, "Try loader=prefetch: 4.00 times as fast"), (1.0, "data-bound")])
def test_a_change_of_the_loader_is_proposed_only_if_it_was_faster_when_tried(tmp_path, monkeypatch, speed, says):
    monkeypatch.setattr(f"{REPORT}.Trials.free", lambda _, step: Interval.of([step / 10]))
    monkeypatch.setattr(f"{REPORT}.Trials.change", lambda _, overrides, step: Interval.of([step / speed]))
    monkeypatch.setattr(f"{REPORT}.diagnose", lambda _: DATA_BOUND)
    summary = train(tmp_path)
    assert says in summary["verdict"]
    assert summary["try"] == (["loader=prefetch"] if speed > 1 else [])
    assert summary["gain"] == (pytest.approx(4.0) if speed > 1 else 10.0)


def first_ones(samples: list) -> dict:
    """A batch of two samples, and as many more as the first one's label says."""
    return default_collate(samples[: 2 + samples[0]["label"]])


def test_what_is_measured_after_a_run_tells_how_batches_vary(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(f"{REPORT}.diagnose", lambda measured: found.append(measured) or Verdict("step", "said"))
    train(tmp_path / "equal", "timing.trial_seconds=0.05")
    collate = f"+data.collate={{_target_: {__name__.rpartition('.')[2]}.first_ones}}"
    train(tmp_path / "several", "timing.trial_seconds=0.05", collate)
    equal, several = found
    assert equal.sizes[0] == equal.sizes[1] > 1 and several.sizes[0] < several.sizes[1]
    assert equal.free.low > 0 and 0 <= equal.others <= 1


def test_a_run_that_is_killed_while_changes_are_tried_has_its_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{REPORT}.Trials.free", lambda _, step: os._exit(9))
    child = os.fork()
    if child == 0:
        train(tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["images_per_second"] > 0 and summary["epochs"] == 2
    assert summary["verdict"] == "the run was stopped before its bottleneck was measured"


def test_a_finished_run_continued_in_a_new_folder_is_evaluated_and_says_so(tmp_path, undisturbed):
    again = train(tmp_path, f"train.resume={undisturbed}")
    assert again["test_accuracy"] == json.loads((undisturbed / "summary.json").read_text())["test_accuracy"]
    assert again["verdict"] == "nothing was left to train: the checkpoint was evaluated"


def test_a_run_that_a_signal_stops_reports_where_its_time_went_until_then(tmp_path, monkeypatch):
    step = Trainer.train_step

    def stopped(trainer, batch):
        step(trainer, batch)
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "train_step", stopped)
    with pytest.raises(Stopped):
        train(tmp_path)
    assert "\ncomputing " in (tmp_path / "report.md").read_text()
