"""The benchmarks with almost no work: every row of every workload is measured, and what they write."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image

from extras.benchmarks import photographs
from tests.configs import composed_by_hydra
from tests.data.fakes import write_images
from tests.infrastructure.later import Later

bench_device = Later("extras.benchmarks.bench_device")
bench_images = Later("extras.benchmarks.bench_images")
true_verdicts = Later("extras.benchmarks.true_verdicts")
large = Later("extras.benchmarks.large")
LITTLE = ["--seconds", "0.1", "--workers", "1"]
TINY = ["--tiny", "--workers", "1", "--steps", "2"]


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images", ("cat",), count=64)


@pytest.mark.parametrize(
    "workload", ["jpeg", "own", pytest.param("packed", marks=pytest.mark.slow), "cached", "decoders"]
)
def test_all_rows_deliver_the_same_kind_of_batch(images, tmp_path, workload):
    if workload == "packed" and not bench_images.PACK_IMAGES.exists():
        pytest.skip("extras/packed was deleted")
    assert bench_images.WORKLOADS.keys() == {"jpeg", "own", "packed", "cached", "decoders"}, "all are tested"
    makers = bench_images.WORKLOADS[workload](images, tmp_path)
    assert makers.keys() >= (bench_images.DOCUMENTED.get(workload, {}).keys() or {"pillow"} & makers.keys())
    for make in makers.values():
        batch = next(iter(make(1)))
        image = batch["image"] if isinstance(batch, dict) else batch[0]
        assert (len(image), image[0].numel(), image.dtype) == (64, 3 * 224 * 224, torch.uint8)


def test_a_workload_is_measured_without_the_stock_loader_too_and_beside_the_documented_ratios(images, capsys):
    bench_images.main(["--workload", "jpeg", "--loaders", "workers", *LITTLE, "--data-root", str(images)])
    (row,) = (line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| workers"))
    assert float(row[1].replace(",", "")) > 0 and float(row[4]) == bench_images.DOCUMENTED["jpeg"]["workers"]


def test_large_sizes_are_tried_at_any_scale_with_seconds_and_bytes(capsys):
    needed = {"classes": "finished", "tars": "webdataset"}
    extras = Path(__file__).parents[2]
    large.main(
        ["--scale", "0.001", "--only", *(part for part in large.PARTS if (extras / needed.get(part, "")).exists())]
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 9 and all(re.search(r": .* \d+\.\d\d s +[\d,]+ bytes$", line) for line in lines)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_every_row_is_measured_and_compared_with_the_limit(tmp_path, capsys, device):
    path = tmp_path / "rows.json"
    picture = tmp_path / "rows.png"
    bench_device.main([*TINY, "--device", device, "--json", str(path), "--picture", str(picture)])
    result = json.loads(path.read_text())
    table = capsys.readouterr().out
    assert (result["model"], result["batch_size"], result["num_workers"]) == ("tiny", 8, 1)
    timm = ["timm"] if find_spec("timm") else []
    loaders = ["limit", "ready", "torch", "predata", *timm, "workers", "prefetch"]
    assert [row["loader"] for row in result["rows"]] == loaders
    assert picture.read_bytes().startswith(b"\x89PNG")
    for row in result["rows"]:
        assert row["images_per_second"] == pytest.approx(8 * row["steps_per_second"]) and 0 <= row["idle"] <= 1
        assert row["loader"] in table
    assert result["rows"][0]["ratio_to_limit"] == 1


def test_without_a_network_the_rows_say_how_fast_batches_reach_the_device(tmp_path, monkeypatch):
    monkeypatch.setitem(bench_device.MODELS, "none", (torch.nn.Identity, 32, 10, 4, 2))  # 32 instead of 224 pixels
    monkeypatch.setattr("extras.benchmarks.bench_device.LOADERS", ("limit", "ready", "workers"))
    path = tmp_path / "rows.json"
    bench_device.main(["--model", "none", "--device", "cpu", "--workers", "1", "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["model"] == "none" and len(result["rows"]) == 3
    assert all(row["images_per_second"] > 0 for row in result["rows"])


def test_photographs_are_as_large_as_real_ones_no_two_are_the_same_and_each_time_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(photographs, "COUNTS", {"train": 1, "val": 1})
    made = photographs.Photographs(train=True, root=tmp_path / "first", image_size=32)
    assert (len(made), len(made.classes), made[0]["image"].shape) == (10, 10, (32, 32, 3))
    photographs.make(tmp_path / "again")
    first, again = (sorted(tmp_path.glob(f"{name}/*/*/*.jpg")) for name in ("first", "again"))
    content = [path.read_bytes() for path in first]
    assert content == [path.read_bytes() for path in again] and len({*content}) == 20
    assert all(50_000 < len(data) < photographs.BYTES for data in content)
    for path in first:
        with Image.open(path) as image:
            assert image.size == (500, 375)
    chosen = composed_by_hydra("experiment=data_bound", "loader=torch")
    assert chosen.data["_target_"] == "extras.benchmarks.photographs.Photographs" and chosen.loader.name == "torch"


def test_a_verdict_is_compared_with_the_truth_that_was_built_in(monkeypatch, capsys):
    monkeypatch.setattr(true_verdicts, "SECONDS", 0.5)
    assert true_verdicts.main(["--rounds", "1", "--only", "inline, samples sleep"]) == 0
    monkeypatch.setattr(true_verdicts.Situation, "run", lambda situation: "host-bound: no")
    assert true_verdicts.main(["--rounds", "1", "--only", "inline, samples sleep"]) == 1
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith(("right    inline, samples sleep (data-bound): data-bound: ", "withheld "))
    assert output[-1] == "1 situations: 0 right, 0 withheld, 1 wrong"
