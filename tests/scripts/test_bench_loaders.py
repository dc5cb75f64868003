"""scripts/bench_loaders.py with almost no work: what it writes, and what it refuses."""

import json

import pytest

from tests.data.reading import refused
from tests.infrastructure.later import Later

bench = Later("scripts.bench_loaders")
bench_workloads = Later("scripts.bench_workloads")

FIGURES = {"images_per_second", "ratio_to_torch", "documented", "first_batch_seconds"}


def test_every_row_is_measured_listed_as_asked_for_and_compared_with_the_stock_loader(tmp_path, capsys):
    path = tmp_path / "rows.json"
    bench.main(f"--workload tiny --loaders torch,workers --seconds 0.1 --workers 1 --json {path}".split())
    result = json.loads(path.read_text())
    assert (result["workload"], result["num_workers"]) == ("tiny", 1)
    table = capsys.readouterr().out
    stock, ours = result["rows"]
    for row in (stock, ours):
        assert row.keys() == FIGURES | {"loader", "spread", "cpu_seconds_per_1000"} and row["loader"] in table
        assert all(row[figure] > 0 for figure in FIGURES), row
    assert (stock["loader"], ours["loader"]) == ("torch", "workers")
    assert ours["ratio_to_torch"] == pytest.approx(ours["images_per_second"] / stock["images_per_second"])
    assert ours["documented"] == bench_workloads.DOCUMENTED["tiny"]["workers"]


def test_a_loader_that_is_unknown_or_fails_ends_the_bench_with_its_name_and_the_reason():
    def make(num_workers):
        raise OSError("no such camera")

    with refused("mine: OSError: no such camera"):
        bench.measure_in_child("mine", make, 1, 0.1)
    with refused("--loaders=worker: use one of torch, workers, "):
        bench.main(["--workload", "tiny", "--loaders", "torch,worker"])
