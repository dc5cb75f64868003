"""bench_images.py: every row of every workload reads a folder of images."""

import pytest
import torch

from extras.benchmarks import bench_images as bench
from tests.data.fakes import write_images
from tests.scripts.test_bench_loaders import kinds_of_batches


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images", ("cat",), count=64)


@pytest.mark.parametrize(
    "workload", [pytest.param(one, marks=[pytest.mark.slow] if one == "packed" else []) for one in bench.WORKLOADS]
)
def test_all_rows_deliver_the_same_kind_of_batch(images, tmp_path, workload):
    if workload == "packed" and not bench.PACK_IMAGES.exists():
        pytest.skip("extras/packed was deleted")
    makers = bench.WORKLOADS[workload](images, tmp_path)
    assert makers.keys() >= (bench.DOCUMENTED[workload].keys() or {"pillow"} & makers.keys())
    size = 16 if workload == "evaluation" else 64
    assert set(kinds_of_batches(makers)) == {(size, 3 * 224 * 224, torch.uint8)}


def test_a_workload_is_measured_beside_the_documented_ratios(images, capsys):
    arguments = ["--workload", "jpeg", "--loaders", "torch,workers", "--seconds", "0.1", "--workers", "1"]
    bench.main([*arguments, "--data-root", str(images)])
    (row,) = (line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| workers"))
    assert float(row[1].replace(",", "")) > 0 and float(row[4]) == bench.DOCUMENTED["jpeg"]["workers"]
