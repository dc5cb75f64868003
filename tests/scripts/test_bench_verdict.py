"""scripts/bench_verdict.py: its cases can be built, and it compares a verdict with the truth. No case is trained."""

import json
import shlex
from dataclasses import replace

import pytest
import yaml

from scripts import bench_verdict as bench
from scripts import verdict_parts as parts
from scripts.verdict_cases import CASES, Case
from training.targets import build

NAMES = [(name, held_out) for held_out in (False, True) for name in bench.chosen(None, held_out)]
SUMMARY = {"images_per_second": 100.0, "seconds": 8.0, "verdict": "a sentence"}


def of(name: str, held_out: bool) -> Case:
    return bench.chosen(name, held_out)[name]


def test_there_are_twenty_three_cases():
    assert len({name for name, _ in NAMES}) == 23


@pytest.mark.parametrize(("name", "held_out"), NAMES)
def test_a_case_has_a_dataset_and_a_model_and_can_be_run_without_its_bottleneck(tmp_path, name, held_out):
    case = of(name, held_out)
    cheap = {key: 0 for key in case.data if key.endswith("_ms")}
    bench.write_config(replace(case, data={**case.data, **cheap}), tmp_path)
    data, model = (yaml.safe_load((tmp_path / group / "constructed.yaml").read_text()) for group in ("data", "model"))
    for train, length in ((True, case.data["length"]), (False, data["test_length"])):
        dataset = build("data", data, train=train)
        assert len(dataset) == length
        assert dataset[1]["image"].shape == dataset.image_shape
    if "of" not in case.model:
        build("model", model, num_classes=10, in_channels=3)
    for override in shlex.split(case.without):
        group, _, key = override.partition("=")[0].partition(".")
        assert key in {"data": {**data, "collate": None}, "model": {**model, **case.model}}.get(group, [key])


def test_a_slow_sample_costs_as_much_as_all_samples_of_even_cost(monkeypatch):
    spent: list[float] = []
    monkeypatch.setitem(parts.COSTS, "wait", spent.append)
    totals = []
    for every in (1, 50):
        spent.clear()
        dataset = parts.Uneven(train=True, every=every, length=100, wait_ms=2.0)
        for index in range(100):
            dataset[index]
        totals.append((len(spent), sum(spent)))
    assert totals == [(100, pytest.approx(0.2)), (2, pytest.approx(0.2))]


@pytest.mark.parametrize(("said", "right"), [("decoding", "yes"), ("step", "NO"), (None, "-")])
def test_a_verdict_is_compared_with_the_truth_and_its_gain_with_the_measured_one(
    tmp_path, monkeypatch, capsys, said, right
):
    runs = []

    def train(case: Case, extra: list[str]) -> dict:
        runs.append(extra)
        verdict = {"bottleneck": said, "try": ["loader.num_workers=2"], "gain": 1.9} if said else {}
        return {**SUMMARY, **verdict, "images_per_second": 200.0 if extra else 100.0}

    monkeypatch.setattr(bench, "train", train)
    monkeypatch.setattr(bench.os, "sched_setaffinity", lambda *_: None)
    path, name = tmp_path / "rows.json", "python_too_few_workers"
    bench.main(["--cases", name, "--gains", "--repeat", "3", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["case"], row["truth"], row["right"]) == (name, "decoding", right)
    assert (row["estimated"], row["measured"]) == ((1.9, 2.0) if said else (None, None))
    assert runs == [[], ["loader.num_workers=2"]] * 3 if said else [[]] * 3
    printed = capsys.readouterr().out
    assert f"{int(right == 'yes')} of 1 verdicts name the bottleneck" in printed
    assert ("1 of 1 data-bound estimates are within 15 % of the gain" in printed) == bool(said)


def test_a_case_that_fails_is_wrong_and_the_others_are_still_run(monkeypatch, capsys):
    def train(case: Case, extra: list[str]) -> dict:
        if case.truth == {"reading"}:
            raise bench.BenchError("train.py failed")
        return {**SUMMARY, "bottleneck": "decoding", "try": [], "gain": 1.0}

    monkeypatch.setattr(bench, "train", train)
    monkeypatch.setattr(bench.os, "sched_setaffinity", lambda *_: None)
    bench.main(["--cases", "slow_disk,python_too_few_workers"])
    printed = capsys.readouterr()
    assert "1 of 2 verdicts name the bottleneck" in printed.out
    assert "slow_disk: train.py failed" in printed.err


def test_the_gain_outside_of_training_is_that_of_the_whole_run():
    after = {"images_per_second": 100.0, "seconds": 2.0}
    assert bench.gain(CASES["slow_evaluation"], SUMMARY, after) == 4
    assert bench.gain(CASES["slow_disk"], SUMMARY, after) == 1


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
