"""scripts/bench_loaders.py with almost no work: what it writes, and what it refuses."""

import json

import pytest
import torch
from later import Later
from PIL import Image

from data.images.decoders import DECODERS
from training.config import ConfigError

bench, bench_workloads = Later("scripts.bench_loaders"), Later("scripts.bench_workloads")

FIELDS = {"loader", "images_per_second", "spread", "ratio_to_torch", "first_batch_seconds", "cpu_seconds_per_1000"}


def test_every_row_is_measured_and_listed_in_the_order_that_was_asked_for(tmp_path, capsys):
    path = tmp_path / "rows.json"
    names = ["--loaders", "torch,workers"]
    bench.main(["--workload", "overhead", *names, "--seconds", "0.1", "--workers", "1", "--json", str(path)])
    result = json.loads(path.read_text())
    assert (result["workload"], result["num_workers"]) == ("overhead", 1)
    table = capsys.readouterr().out
    for row in result["rows"]:
        assert row.keys() == FIELDS
        assert all(row[field] > 0 for field in FIELDS - {"loader", "spread", "cpu_seconds_per_1000"}), row
        assert row["cpu_seconds_per_1000"] >= 0, "the system counts it in steps of 10 ms"
        assert row["loader"] in table
    assert [row["loader"] for row in result["rows"]] == ["torch", "workers"]


def test_each_row_is_compared_with_the_stock_loader_at_its_batch_size_if_that_was_measured(monkeypatch):
    rates = {"torch": 100.0, "workers": 300.0, "torch-1": 10.0, "workers-1": 50.0}
    monkeypatch.setattr("scripts.bench_loaders.measure_in_child", lambda name, *_: {"images_per_second": rates[name]})

    def ratios(*names: str) -> list[float | None]:
        return [row["ratio_to_torch"] for row in bench.bench(dict.fromkeys(names), 1, 0.1)]

    assert ratios(*rates) == [1, 3, 1, 5]
    assert ratios("workers", "torch-1", "workers-1") == [None, 1, 5]


def check_rows(makers, shape, dtype):
    """Each row's first batch has images of this shape and dtype."""
    for name, make in makers.items():
        loader = make(1)
        batch = next(iter(loader))
        image = batch["image"] if isinstance(batch, dict) else batch[0]
        assert (image.shape[0], image.shape[1:].numel(), image.dtype) == (*shape, dtype), name
        if hasattr(loader, "close"):
            loader.close()


def test_all_rows_of_cifar_deliver_the_same_kind_of_batch():
    check_rows(bench_workloads.cifar(length=1024), (512, 3 * 32 * 32), torch.float32)


def test_every_row_reads_a_folder_of_images(tmp_path, monkeypatch, python):
    def start_quickly(command, **_):
        return python.run(*command[1:], "--workers", 0, timeout=100, quick_exit=True)

    monkeypatch.setattr(bench_workloads.subprocess, "run", start_quickly)
    pytest.importorskip("data.packed", reason="a fork may have deleted it")
    root = tmp_path / "images"
    for split in ("train", "val"):
        (root / split / "cat").mkdir(parents=True)
        for number in range(64):
            Image.new("RGB", (60, 40)).save(root / split / "cat" / f"{number}.jpg")
    for workload, batch_size in (("jpeg", 64), ("packed", 64), ("decoders", 64), ("evaluation", 16)):
        makers = bench.WORKLOADS[workload](root, tmp_path)
        check_rows(makers, (batch_size, 3 * 224 * 224), torch.uint8)
    assert "pillow" in bench.WORKLOADS["decoders"](root, tmp_path).keys() <= {*DECODERS, "pillow"}


def test_a_loader_that_is_unknown_or_fails_ends_the_bench_with_its_name_and_the_reason():
    def make(num_workers: int):
        raise OSError("no such camera")

    with pytest.raises(ConfigError, match="mine: OSError: no such camera"):
        bench.bench({"mine": make}, 1, 0.1)
    with pytest.raises(ConfigError, match="--loaders=worker: did you mean workers"):
        bench.main(["--workload", "overhead", "--loaders", "torch,worker"])
