"""scripts/bench_loaders.py with almost no work: what it writes, and what it refuses."""

import json

import pytest
import torch

from tests.later import Later
from training.config import ConfigError

bench, bench_workloads = Later("scripts.bench_loaders"), Later("scripts.bench_workloads")

FIGURES = {"images_per_second", "ratio_to_torch", "documented", "first_batch_seconds"}


def test_every_row_is_measured_and_listed_in_the_order_that_was_asked_for(tmp_path, capsys):
    path = tmp_path / "rows.json"
    bench.main(f"--workload tiny --loaders torch,workers --seconds 0.1 --workers 1 --json {path}".split())
    result = json.loads(path.read_text())
    assert (result["workload"], result["num_workers"]) == ("tiny", 1)
    table = capsys.readouterr().out
    for row in result["rows"]:
        assert row.keys() == FIGURES | {"loader", "spread", "cpu_seconds_per_1000"} and row["loader"] in table
        assert all(row[figure] > 0 for figure in FIGURES), row
    assert [row["loader"] for row in result["rows"]] == ["torch", "workers"]


def test_each_row_is_compared_with_the_stock_loader_if_that_was_measured_and_with_the_documented_ratio(monkeypatch):
    rates = {"torch": 100.0, "workers": 300.0, "threads": 200.0}
    monkeypatch.setattr("scripts.bench_loaders.measure_in_child", lambda name, *_: {"images_per_second": rates[name]})

    def ratios(*names: str) -> list[tuple[float | None, float | None]]:
        rows = bench.bench(dict.fromkeys(names), 1, 0.1, {"workers": 2.5})
        return [(row["ratio_to_torch"], row["documented"]) for row in rows]

    assert ratios(*rates) == [(1, None), (3, 2.5), (2, None)]
    assert ratios("workers") == [(None, 2.5)]


def test_all_rows_of_cifar_deliver_the_same_kind_of_batch():
    for make in bench_workloads.cifar(length=1024).values():
        loader = make(1)
        batch = next(iter(loader))
        image = batch["image"] if isinstance(batch, dict) else batch[0]
        assert (len(image), image[0].numel(), image.dtype) == (512, 3 * 32 * 32, torch.float32)
        getattr(loader, "close", list)()


def test_a_loader_that_is_unknown_or_fails_ends_the_bench_with_its_name_and_the_reason():
    def make(num_workers: int):
        raise OSError("no such camera")

    with pytest.raises(ConfigError, match="mine: OSError: no such camera"):
        bench.bench({"mine": make}, 1, 0.1, {})
    with pytest.raises(ConfigError, match="--loaders=worker: use one of torch, workers, "):
        bench.main(["--workload", "tiny", "--loaders", "torch,worker"])
