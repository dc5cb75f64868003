"""Each example trains from its own folder's configs, and is evaluated without --trust."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from examples.text.lines import write
from tests.configs import composed_by_hydra
from train import run

ROOT = Path(__file__).resolve().parents[2]
FEW = [
    "train.max_steps=4",
    "train.epochs=1",
    "train.batch_size=16",
    "loader.num_workers=0",
    "train.log_interval=2",
    "callbacks/standard=[best]",
]


@pytest.fixture
def fork(tmp_path):
    """Trains an experiment of an example, and returns its folder, summary, and lines of metrics.jsonl."""

    def train(example: str, experiment: str, *overrides: str):
        where = f"hydra.searchpath=[file://{ROOT}/examples/{example}/conf]"  # as --config-dir
        folder, config = tmp_path / "run", composed_by_hydra(where, f"experiment={experiment}", *FEW, *overrides)
        summary = run(config, folder)
        return folder, summary, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return train


def script(name: str, *arguments: object) -> dict:
    module = pytest.importorskip(f"scripts.{name}", reason="a fork may have deleted it")
    return module.main([*map(str, arguments), "loader.num_workers=0"])


def test_segmentation_learns_shapes_and_predict_writes_masks(tmp_path, fork):
    small = ["data.length=64", "model.width=8", "train.max_steps=40", "train.epochs=10", "optim.lr=0.01"]
    folder, summary, _ = fork("segmentation", "segmentation", *small)
    assert summary["score"] == "test_miou" and summary["test_miou"] > 0.35
    assert script("evaluate", f"{folder}/checkpoints/last.pt")["miou"] == pytest.approx(summary["test_miou"])
    script("predict", folder, "--out", tmp_path / "masks.csv")
    rows = list(csv.DictReader((tmp_path / "masks.csv").open()))
    assert len(rows) == 16
    with Image.open(rows[0]["mask"]) as mask:
        assert mask.size == (32, 32) and set(mask.getdata()) <= {0, 1, 2}
    Image.new("RGB", (50, 40)).save(tmp_path / "photo.png")
    script("predict", folder, tmp_path / "photo.png", "--out", tmp_path / "photos.csv")
    (row,) = csv.DictReader((tmp_path / "photos.csv").open())
    assert Path(row["mask"]).exists()


@pytest.mark.parametrize("experiment", ["simclr", "moco"])
def test_two_views_are_learned_without_labels(fork, experiment):
    folder, summary, _ = fork("simclr", experiment, "data.length=64", "model.width=8")
    assert summary["score"] == "test_nearest" and 0 <= summary["test_nearest"] <= 1
    assert "nearest" in script("evaluate", folder)


def test_text_in_length_buckets_is_learned(fork):
    folder, summary, lines = fork("text", "text", "data.length=400", "train.max_steps=null", "train.epochs=6")
    assert summary["test_accuracy"] > 0.7
    assert [line["step"] for line in lines if "test_accuracy" in line] == [25 * epoch for epoch in range(1, 7)]
    assert "accuracy" in script("evaluate", folder)


def test_text_from_jsonl_shards_is_learned_as_a_stream(tmp_path, fork):
    write(tmp_path / "lines", shards=4)
    settings = [f"data.root={tmp_path}/lines", "train.max_steps=null", "train.epochs=2", "loader.streams=4"]
    folder, summary, lines = fork("text", "lines", *settings, "train.steps_per_epoch=150", "loader.num_workers=1")
    assert summary["test_accuracy"] > 0.7
    assert [line["step"] for line in lines if "test_accuracy" in line] == [150, 300]
    assert "accuracy" in script("evaluate", folder)


def test_a_gan_steps_two_optimizers_itself_and_logs_both_losses(fork):
    _, summary, lines = fork("training_steps", "gan")
    assert summary["score"] == "test_loss" and 0 <= summary["test_found"] <= 1
    assert all({"generator_loss", "discriminator_loss"} <= line.keys() for line in lines if "lr" in line)


def test_a_student_learns_from_a_frozen_teacher(fork):
    folder, _, lines = fork("training_steps", "distillation")
    assert all(line["distance"] > 0 for line in lines if "lr" in line)
    assert "accuracy" in script("evaluate", folder)
