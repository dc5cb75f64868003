"""Each example trains from its own folder's configs, and is evaluated without --trust."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from examples.text.lines import write

ROOT = Path(__file__).resolve().parents[2]
FEW = ["train.max_steps=4", "train.epochs=1", "train.batch_size=16", "loader.num_workers=0", "train.log_interval=2"]


@pytest.fixture
def fork(python, tmp_path):
    """Trains an experiment of an example, and returns its folder, summary, and lines of metrics.jsonl."""

    def train(example: str, experiment: str, *overrides: str):
        config = ["--config-dir", ROOT / "examples" / example / "conf", f"experiment={experiment}"]
        command = [ROOT / "train.py", *config, "hydra.run.dir=run", *FEW, *overrides]
        done = python.run(*command, cwd=tmp_path, timeout=100, quick_exit=True)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        return tmp_path / "run", json.loads((tmp_path / "run" / "summary.json").read_text()), lines

    return train


def script(python, folder: Path, name: str, *arguments: str) -> str:
    if not (ROOT / "scripts" / f"{name}.py").exists():
        pytest.skip("a fork may have deleted it")
    done = python.run(ROOT / "scripts" / f"{name}.py", *arguments, cwd=folder, timeout=100, quick_exit=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_segmentation_learns_shapes_and_predict_writes_masks(python, tmp_path, fork):
    small = ["data.length=64", "model.width=8", "train.max_steps=40", "train.epochs=10", "optim.lr=0.01"]
    run, summary, _ = fork("segmentation", "segmentation", *small)
    assert summary["score"] == "test_miou" and summary["test_miou"] > 0.35
    assert f"miou {summary['test_miou']:.4f}" in script(python, tmp_path, "evaluate", f"{run}/checkpoints/last.pt")
    script(python, tmp_path, "predict", run, "--out", tmp_path / "masks.csv")
    rows = list(csv.DictReader((tmp_path / "masks.csv").open()))
    assert len(rows) == 16
    with Image.open(rows[0]["mask"]) as mask:
        assert mask.size == (32, 32) and set(mask.getdata()) <= {0, 1, 2}
    Image.new("RGB", (50, 40)).save(tmp_path / "photo.png")
    script(python, tmp_path, "predict", run, tmp_path / "photo.png", "--out", tmp_path / "photos.csv")
    (row,) = csv.DictReader((tmp_path / "photos.csv").open())
    assert Path(row["mask"]).exists()


@pytest.mark.parametrize("experiment", ["simclr", "moco"])
def test_two_views_are_learned_without_labels(python, tmp_path, fork, experiment):
    run, summary, _ = fork("simclr", experiment, "data.length=64", "model.width=8")
    assert summary["score"] == "test_nearest" and 0 <= summary["test_nearest"] <= 1
    assert "nearest" in script(python, tmp_path, "evaluate", run)


def test_text_in_length_buckets_is_learned_and_resumed(python, tmp_path, fork):
    run, summary, lines = fork("text", "text", "data.length=400", "train.max_steps=null", "train.epochs=6")
    assert summary["test_accuracy"] > 0.7
    assert [line["step"] for line in lines if "test_accuracy" in line] == [25 * epoch for epoch in range(1, 7)]
    assert "accuracy" in script(python, tmp_path, "evaluate", run)


def test_text_from_jsonl_shards_is_learned_as_a_stream(python, tmp_path, fork):
    write(tmp_path / "lines", shards=4)
    settings = [f"data.root={tmp_path}/lines", "train.max_steps=null", "train.epochs=2", "loader.streams=4"]
    run, summary, lines = fork("text", "lines", *settings, "train.steps_per_epoch=150", "loader.num_workers=1")
    assert summary["test_accuracy"] > 0.7
    assert [line["step"] for line in lines if "test_accuracy" in line] == [150, 300]
    assert "accuracy" in script(python, tmp_path, "evaluate", run)


def test_a_gan_steps_two_optimizers_itself_and_logs_both_losses(fork):
    _, summary, lines = fork("training_steps", "gan")
    assert summary["score"] == "test_loss" and 0 <= summary["test_found"] <= 1
    assert all({"generator_loss", "discriminator_loss"} <= line.keys() for line in lines if "lr" in line)


def test_a_student_learns_from_a_frozen_teacher(python, tmp_path, fork):
    run, _, lines = fork("training_steps", "distillation")
    assert all(line["distance"] > 0 for line in lines if "lr" in line)
    assert "accuracy" in script(python, tmp_path, "evaluate", run)
