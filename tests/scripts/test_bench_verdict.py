"""scripts/bench_verdict.py: its cases can be built, and it compares a verdict with the truth. No case is trained."""

import json
import os
import signal

import pytest
from hydra import compose, initialize_config_dir

from scripts import bench_verdict as bench
from scripts import verdict_cases as parts
from scripts.verdict_cases import CASES, HELD_OUT, Case, cases_of
from training.callbacks.report.verdict import CAUSES
from training.config import CONF, checked
from training.targets import build

ALL = cases_of(CASES) | cases_of(HELD_OUT)
SUMMARY = {"images_per_second": 100.0, "seconds": 8.0, "verdict": "a sentence"}


def test_there_are_thirteen_cases_and_ten_held_out():
    assert (len(cases_of(CASES)), len(cases_of(HELD_OUT)), len(ALL)) == (13, 10, 23)
    assert {case.truth for case in ALL.values()} <= {*CAUSES, "not measurable"}


@pytest.mark.parametrize("name", ALL)
def test_a_case_has_a_dataset_and_a_model_and_can_be_run_without_its_bottleneck(name):
    case = ALL[name]
    for extra in ([], case.without.split()):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = checked(compose("config", case.command(extra)[1:]))
        cheap = {key: 0.0 for key in ("cost_ms", "open_ms") if key in config.data}
        options = {key: value for key, value in config.data.items() if key not in ("collate", "val_fraction")}
        for train in (True, False):
            dataset = build("data", options | cheap, train=train)
            assert len(dataset) == config.data["length" if train else "test_length"]
            assert dataset[1]["image"].shape == dataset.image_shape
        build("model", config.model, num_classes=10, in_channels=3)


def test_a_slow_sample_costs_as_much_as_all_samples_of_even_cost(monkeypatch):
    spent: list[float] = []
    monkeypatch.setitem(parts.COSTS, "wait", spent.append)
    totals = []
    for every in (1, 50):
        spent.clear()
        dataset = parts.Costly(train=True, every=every, length=100, cost="wait", cost_ms=2.0)
        for index in range(100):
            dataset[index]
        totals.append((len(spent), sum(spent)))
    assert totals == [(100, pytest.approx(0.2)), (2, pytest.approx(0.2))]


def test_cold_samples_cost_once_and_a_crash_happens_once(monkeypatch):
    spent, killed = [], []
    monkeypatch.setitem(parts.COSTS, "wait", spent.append)
    monkeypatch.setattr(os, "kill", lambda _, number: killed.append(number))
    dataset = parts.Costly(train=True, length=10, cost="wait", cost_ms=2.0, is_cold=True, crash_every=5)
    for index in (*range(10), *range(10)):
        dataset[index]
    assert len(spent) == 10 and killed == [signal.SIGKILL] * 2


@pytest.fixture
def all_cores(monkeypatch):
    monkeypatch.setattr(bench.os, "sched_setaffinity", lambda *_: None)


@pytest.mark.parametrize(("said", "right"), [("reading", "yes"), ("step", "NO"), (None, "-")])
def test_a_verdict_is_compared_with_the_truth_and_its_gain_with_the_measured_one(
    tmp_path, monkeypatch, capsys, all_cores, said, right
):
    runs = []

    def train(case: Case, extra: list[str]) -> dict:
        runs.append(extra)
        verdict = {"bottleneck": said, "try": ["loader.num_workers=2"], "gain": 1.9} if said else {}
        return {**SUMMARY, **verdict, "images_per_second": 200.0 if extra else 100.0}

    monkeypatch.setattr(bench, "train", train)
    path, name = tmp_path / "rows.json", "python_too_few_workers"
    bench.main(["--cases", name, "--gains", "--repeat", "3", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["case"], row["truth"], row["right"]) == (name, "reading", right)
    assert (row["estimated"], row["measured"]) == ((1.9, 2.0) if said else (None, None))
    assert runs == [[], ["loader.num_workers=2"]] * 3 if said else [[]] * 3
    printed = capsys.readouterr().out
    assert f"{int(right == 'yes')} of 1 verdicts name the bottleneck" in printed
    assert ("1 of 1 data-bound estimates are within 15% of the gain" in printed) == bool(said)


def test_a_case_that_fails_is_wrong_and_the_others_are_still_run(monkeypatch, capsys, all_cores):
    def train(case: Case, extra: list[str]) -> dict:
        if case.truth == "step":
            raise bench.BenchError("train.py failed")
        return {**SUMMARY, "bottleneck": "reading", "try": [], "gain": 1.0}

    monkeypatch.setattr(bench, "train", train)
    bench.main(["--cases", "slow_step,python_too_few_workers"])
    printed = capsys.readouterr()
    assert "1 of 2 verdicts name the bottleneck" in printed.out
    assert "slow_step: train.py failed" in printed.err


def test_the_gain_outside_of_training_is_that_of_the_whole_run(monkeypatch, capsys, all_cores):
    after = {"images_per_second": 100.0, "seconds": 2.0}
    assert bench.gain(ALL["slow_evaluation"], SUMMARY, after) == 4
    assert bench.gain(ALL["slow_disk"], SUMMARY, after) == 1
    monkeypatch.setattr(bench, "train", lambda case, extra: after if extra else SUMMARY)
    bench.main(["--check", "--cases", "slow_evaluation"])
    assert "4.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "slow_dsk"], "--cases=slow_dsk: did you mean slow_disk?"),
        (["--repeat", "0"], "--repeat 0: give a number above 0"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(arguments, message):
    with pytest.raises(bench.BenchError, match=message):
        bench.main(arguments)
