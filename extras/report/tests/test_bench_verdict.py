"""scripts/bench_verdict.py: its cases can be built, and it compares a verdict with the truth. No case is trained."""

import json

import numpy as np
import pytest
import torch

from scripts import bench_verdict as bench
from scripts import verdict_cases as parts
from tests.configs import composed_by_hydra
from training.callbacks.report.verdict import CAUSES
from training.config import ConfigError, checked
from training.datasets import open_dataset
from training.targets import build

ALL = parts.cases()


def test_every_bottleneck_that_a_verdict_can_name_has_a_case():
    assert len(ALL) == 10 and {truth for truth, _ in ALL.values()} == {*CAUSES, "not measurable"}


@pytest.mark.parametrize("name", ALL)
def test_a_case_has_a_dataset_and_a_model(name):
    config = checked(composed_by_hydra(*ALL[name][1]))
    cheap = {key: 0.0 for key in ("cost_ms", "open_ms") if key in config.data}
    for train in (True, False):
        dataset = open_dataset(config.data | cheap, train, 0)
        assert len(dataset) == config.data["length" if train else "test_length"]
        assert dataset[1]["image"].shape == dataset.image_shape
    build("model", config.model, num_classes=10, in_channels=3)


def test_only_one_split_costs_time_and_each_process_opens_the_data_once(monkeypatch):
    spent: list[tuple[str, float]] = []
    for cost in ("python", "native"):
        monkeypatch.setitem(parts.COSTS, cost, lambda seconds, cost=cost: spent.append((cost, seconds)))
    for train in (True, False):
        dataset = parts.Costly(train, cost_ms=2.0, open_ms=3.0, costly_split="test")
        read_batch = {"image": torch.zeros(2, 32, 32, 3, dtype=torch.uint8), "label": torch.zeros(2).long()}
        dataset.read_batch(np.arange(2), read_batch, None)
        dataset[0]
    assert spent == [("python", 0.0), ("python", 0.003), *[("native", 0.002)] * 3]


@pytest.mark.parametrize(("said", "right"), [("reading", "yes"), ("step", "NO"), (None, "NO")])
def test_a_verdict_is_compared_with_the_truth_and_its_gain_with_the_measured_one(
    tmp_path, monkeypatch, capsys, said, right
):
    def train(overrides: list[str]) -> dict:
        verdict = {"bottleneck": said, "try": said and ["loader.num_workers=2"], "gain": said and 1.9}
        return {**verdict, "images_per_second": 200.0 if overrides[-1] == "loader.num_workers=2" else 100.0}

    monkeypatch.setattr(bench, "train", train)
    monkeypatch.setattr(bench.os, "sched_setaffinity", lambda *_: None)
    path, name = tmp_path / "rows.json", "python_too_few_workers"
    bench.main(["--cases", name, "--gains", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["case"], row["truth"], row["right"]) == (name, "reading", right)
    assert (row["said_gain"], row["measured_gain"]) == ((1.9, 2.0) if said else (None, None))
    assert f"{int(right == 'yes')} of 1 verdicts name the bottleneck" in capsys.readouterr().out


def test_an_unknown_case_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"--cases=slow_stp: did you mean slow_step\?"):
        bench.main(["--cases", "slow_stp"])
