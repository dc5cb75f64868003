"""The reports of whole runs; what bounded a run is tested in test_verdict.py."""

import json
import math
import os
import re
import signal
from resource import RUSAGE_SELF, getrusage

import psutil
import pytest
import torch
from torch.utils.data import default_collate

from tests.test_train import assert_equal_weights, train
from training.callbacks.report.measured import Interval
from training.callbacks.report.report import peak_memory
from training.callbacks.report.verdict import Verdict
from training.stopping import Stopped
from training.trainer import Trainer

REPORT = "training.callbacks.report.report"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    return folder


@pytest.fixture
def found(monkeypatch):
    """The measurements of runs, of which reading is said to be the bottleneck."""
    measured = []
    verdict = Verdict("reading", "found", Interval.of([10.0]))
    monkeypatch.setattr(f"{REPORT}.diagnose", lambda run: measured.append(run) or verdict)
    return measured


def test_a_run_reports_where_its_time_went_with_a_picture(tmp_path):
    pytest.importorskip("training.callbacks.timeline", reason="a fork may have deleted it")
    slow = ["data.length=64", "data.cost=wait", "data.cost_ms=8"]  # the first batch takes 0.26 s
    summary = train(tmp_path, "timing.timeline=16", "timing.warmup_steps=0", "loader.num_workers=2", *slow)
    assert summary["bottleneck"] and summary["memory_bytes"] > 0 and summary["active_workers"] == 2
    text = (tmp_path / "report.md").read_text()
    assert f"\n{summary['verdict']}\n" in text and "\nWorkers: 2, busy " in text
    rows = dict(re.findall(r"^([^\d\n]+?) +(-?[\d.]+) .*%$", text.partition("milliseconds")[0], flags=re.MULTILINE))
    seconds = {name: float(value) for name, value in rows.items()}
    whole = seconds.pop("the whole run, without imports")
    assert sum(seconds.values()) == pytest.approx(whole, abs=0.06 * len(seconds)), "rounded to tenths"
    assert 0 < whole < sum(summary["seconds"].values()) + 0.06, "which is taken later"
    assert seconds["the rest"] >= 0 and seconds["dataset and first batch"] > 0.2
    assert {"set-up", "waiting for the loader", "computing", "evaluation"} < seconds.keys()
    assert "![" in text and (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"worker 0", "worker 1", "training loop"} <= lanes


@pytest.mark.parametrize(("loader", "in_thread"), [("torch", False), ("prefetch", True)])
def test_what_a_preloaders_thread_does_is_no_part_of_the_step(tmp_path, found, loader, in_thread):
    summary = train(tmp_path, f"loader={loader}", "loader.num_workers=0", "timing.warmup_steps=0")
    (run,) = found
    assert run.waiting == pytest.approx(summary["data_wait_fraction"] * run.step)
    assert run.copy == 0 < run.transform, "on a CPU, copying is a part of the transform"
    assert (run.ahead is not None) == in_thread and (run.ahead is None or run.ahead > 0)
    rows = (tmp_path / "report.md").read_text().splitlines()
    assert (next(row for row in rows if row.startswith("waiting for the transform")).split()[4] == "0.0") >= in_thread


def first_ones(samples: list) -> dict:
    """A batch of two samples, or rarely of all."""
    return default_collate(samples[: 2 if samples[0]["label"] else None])


def test_what_is_measured_after_a_run_tells_how_batches_vary_and_changes_nothing_that_it_saved(
    tmp_path, found, undisturbed
):
    tried = train(tmp_path / "equal", "timing.trial_seconds=0.5")
    assert_equal_weights(undisturbed, tmp_path / "equal")
    assert tried["test_accuracy"] == json.loads((undisturbed / "summary.json").read_text())["test_accuracy"]
    collate = f"+data.collate={{_target_: {__name__.rpartition('.')[2]}.first_ones}}"
    train(tmp_path / "several", "timing.trial_seconds=0.5", "train.epochs=8", collate)
    equal, several = found
    assert len(equal.sizes) == 1 + 16 and len(set(equal.sizes)) == 1 < equal.sizes[0]
    assert len(set(several.sizes)) == 2
    assert equal.free.low > 0 and 0 <= equal.others <= 1


@pytest.mark.parametrize(
    ("changes", "tried", "gain"),
    [
        ({"a=1": 1.04, "b=2": 1.06, "c=3": 9.0}, ["b=2"], 1.06),  # the first that is worth it
        ({"a=1": None}, ["a=1"], 10.0),  # it takes too long to be tried
        ({"a=1": 1.0, "b=2": 0.5, "c=3": 0.0}, [], 10.0),
    ],
)
def test_a_change_is_suggested_if_it_was_clearly_faster_or_could_not_be_tried(
    tmp_path, monkeypatch, found, changes, tried, gain
):
    def change(trials, overrides, step):
        speed = changes[overrides[0]]
        return None if speed is None else Interval.of([step / speed if speed else math.inf])

    monkeypatch.setattr(f"{REPORT}.candidates", lambda *_: [("a=1",), ("b=2",), ("c=3",)])
    monkeypatch.setattr(f"{REPORT}.Trials.free", lambda _, step: Interval.of([step / 10]))
    monkeypatch.setattr(f"{REPORT}.Trials.change", change)
    summary = train(tmp_path)
    assert (summary["try"], summary["gain"], summary["bottleneck"]) == (tried, pytest.approx(gain), "reading")
    assert ("Try b=2: 1.06 times as fast" in summary["verdict"]) == (tried == ["b=2"])


KILLED = """
import os, sys
from pathlib import Path
from tests.test_train import train
from training.callbacks.report import report

report.Trials.free = lambda _, step: os._exit(9)
train(Path(sys.argv[1]))
"""


def test_a_run_that_is_killed_while_changes_are_tried_has_its_summary(tmp_path, python):
    assert python.run("-c", KILLED, tmp_path, timeout=100).returncode == 9
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


def test_the_peak_of_memory_counts_what_is_in_use_now():
    before, past = peak_memory(), 1024 * getrusage(RUSAGE_SELF).ru_maxrss - psutil.Process().memory_info().rss
    held = torch.ones((past + (256 << 20)) // 4)
    assert peak_memory() > before + (200 << 20)
    del held
