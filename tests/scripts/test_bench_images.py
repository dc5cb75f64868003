"""scripts/bench_images.py with a few small images: what it says about them, and what it refuses."""

import json

import pytest
import torch
from PIL import Image

from data.errors import DataError
from scripts import bench_images as bench
from scripts.bench_harness import BenchError


@pytest.fixture
def folder(tmp_path):
    """Two JPEGs, a PNG one folder deeper, and files that are no images."""
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for name, size in (
        ("a.jpg", (40, 30)),
        ("b.JPG", (60, 30)),
        ("deep/c.png", (80, 50)),
    ):
        Image.effect_noise(size, 50).convert("RGB").save(tmp_path / "images" / name)
    for name in (".hidden.jpg", "notes.txt"):
        (tmp_path / "images" / name).write_text("not an image")
    return tmp_path / "images"


@pytest.fixture(autouse=True)
def as_many_threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_images_are_described_and_every_decoder_is_measured(folder, tmp_path, capsys):
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    path = tmp_path / "rows.json"
    arguments = ["--seconds", "0.01", "--image-size", "8", "--batch-size", "10", "--steps-per-second", "3"]
    bench.main([str(folder), *arguments, "--json", str(path)])
    result, text = json.loads(path.read_text()), capsys.readouterr().out
    assert result["images"] == 4
    assert "broken.jpg cannot be read as an image" in result["errors"][0]
    assert result["errors"][0] in text
    assert "cores for 30/s" in text
    assert result["rows"][-1]["loader"] == "pillow"
    assert len(result["rows"]) + len(result["errors"]) == 4 + 1, "what is not installed is named"
    for row in result["rows"]:
        assert row["loader"] in text
        assert row["training"] > 0 and row["evaluation"] > 0
        assert row["cores"] == pytest.approx(30 / row["training"])


def test_a_folder_that_cannot_be_measured_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        bench.main([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty names no images \(.jpg, "):
        bench.main([str(tmp_path / "empty")])
    (tmp_path / "empty" / "a.png").write_text("not an image")
    with pytest.raises(BenchError, match=r"none of 1 images can be read; the first: .*a.png cannot be read"):
        bench.main([str(tmp_path / "empty")])
    with pytest.raises(BenchError, match="--images 0: give a number above 0"):
        bench.main([str(folder), "--images", "0"])
