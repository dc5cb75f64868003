"""evaluate.py gives the scores that the run had, and what a finished run needs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data.fashion import FashionMini
from extras.finished import evaluate
from extras.finished.evaluation import MISTAKES, Evaluation
from extras.finished.finished_run import FinishedRun, find
from tests.configs import composed, train
from train import run
from training.config import ConfigError

DOORS = "finished_doors"
ROOT = Path(__file__).resolve().parents[3]
NOISE = ["task.metric=noise", "task.higher_is_better=true"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run on images of 6 classes."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, "model=linear", "data.num_classes=6", "data.test_length=40")
    return folder


def test_the_scores_are_those_of_the_run_and_all_is_written(trained, tmp_path, capsys):
    result = evaluate.main([str(trained / "checkpoints" / "last.pt"), "--out", str(tmp_path)])
    summary = json.loads((trained / "summary.json").read_text())
    assert (result["accuracy"], result["loss"]) == (summary["test_accuracy"], pytest.approx(summary["test_loss"]))
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result
    assert len(result["classes"]) == 6 and result["samples"] == 40
    for name in ("confusion.png", "mistakes.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "precision" in printed and "class 5" in printed and "of 40 samples (test)" in printed


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=linear", "callbacks.ema.decay=0.9"],  # the mean of the weights was evaluated
        [
            f"trainer._target_={DOORS}.Noise",
            "task.metric=noise",
            "task.higher_is_better=true",
            "data.num_classes=6",
            "model=linear",
        ],
        ["model=linear", "data.num_classes=3", "task.class_weights=[1,2,1]", "data.val_fraction=0.25"],
    ],
)
def test_what_a_run_evaluated_is_evaluated(tmp_path, overrides):
    summary = train(tmp_path, *overrides)
    result = evaluate.main([str(tmp_path / "checkpoints" / "last.pt"), "--split", "test"])
    names = [name for name in summary if name.startswith("test_")]
    assert names
    for name in names:
        assert result[name.removeprefix("test_")] == pytest.approx(summary[name], rel=1e-5), name
    if "data.val_fraction=0.25" in overrides:
        validated = evaluate.main([str(tmp_path / "checkpoints" / "last.pt"), "--split", "val"])
        assert validated["samples"] == 64


def test_other_data_can_be_evaluated_by_single_keys_or_by_another_dataset(trained, tmp_path):
    assert evaluate.main([str(trained), "data.test_length=3", "--out", str(tmp_path)])["samples"] == 3
    with pytest.raises(ConfigError, match=r"best\.pt does not fit Sequential"):
        FinishedRun(trained, ["data.num_classes=7"])
    with pytest.raises(ConfigError, match="does not fit"):
        FinishedRun(trained, ["data=fashion_mini"])
    with pytest.raises(ConfigError, match="has no validation set"):
        FinishedRun(trained).dataset("val")


def test_training_images_are_evaluated_without_augmentation(tmp_path):
    augmented = ["data=fashion_mini", "data.pad=2", "data.flip=true", "model=linear", "train.max_steps=1"]
    run(composed(*augmented, "callbacks/standard=[best]", "loader=torch", "loader.num_workers=0"), tmp_path)
    dataset, plain = FinishedRun(tmp_path).dataset("train"), FashionMini(train=True, pad=0, flip=False)
    assert all(torch.equal(dataset[index]["image"], plain[index]["image"]) for index in range(50))


def test_a_task_without_classes_has_scores_alone(tmp_path):
    table = [f"data._target_={DOORS}.Table", "task=regression", "task.inputs=[left,right]", "task.label=y"]
    train(tmp_path, *table, f"model._target_={DOORS}.MLP")
    result = evaluate.main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert {"mae", "mse"} < result.keys()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["evaluation.json"]


def test_the_best_checkpoint_is_used_else_the_newest(trained, tmp_path):
    assert find(trained).name == "best.pt"
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    newest = next((tmp_path / "checkpoints").glob("step-*.pt")).rename(tmp_path / "checkpoints" / "step-0000099.pt")
    assert find(tmp_path).resolve() == newest.resolve() == find(newest).resolve(), "best.pt leads nowhere now"
    for file in (tmp_path / "checkpoints").glob("step-*.pt"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"no checkpoints/step-\*\.pt below it"):
        find(tmp_path)


def test_the_table_and_the_mistakes_are_those_of_the_predictions():
    evaluation = Evaluation(["a", "b", "c"], "image", [0.5], [0.25])
    images = torch.tensor([0.0, 51.0, 102.0, 255.0]).view(4, 1, 1, 1)
    probabilities = torch.tensor([[0.8, 0.2, 0.0], [0.9, 0.1, 0.0], [0.4, 0.6, 0.0], [0.6, 0.4, 0.0]])
    evaluation.add({"image": (images / 255 - 0.5) / 0.25}, torch.tensor([0, 1, 1, 1]), probabilities)
    a, b, c = evaluation.by_class()
    assert (a["images"], a["precision"], a["recall"], a["f1"]) == (1, 1 / 3, 1.0, 0.5)
    assert (b["images"], b["precision"], b["recall"], b["f1"]) == (3, 1.0, 1 / 3, 0.5)
    assert c == {"class": "c", "images": 0, "precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert [int(mistake.image.item()) for mistake in evaluation.mistakes] == [51, 255], "the least probable first"
    assert evaluation.mistakes[0].predicted_probability == pytest.approx(0.9)


def test_only_the_worst_mistakes_of_all_batches_are_kept():
    evaluation = Evaluation(["a", "b"], "image", [0.0] * 3, [1.0] * 3)
    of_truth = torch.from_numpy(np.random.default_rng(0).permutation(60) / 200)
    for part in of_truth.split(30):
        images = {"image": torch.zeros(30, 3, 1, 1)}
        evaluation.add(images, torch.zeros(30).long(), torch.stack([part, 1 - part], dim=1))
    assert [mistake.truth_probability for mistake in evaluation.mistakes] == sorted(of_truth.tolist())[:MISTAKES]


@pytest.mark.timeout(300)
def test_a_program_starts_in_any_folder_and_a_mistake_is_one_sentence(tmp_path):
    for name in ("evaluate", "predict", "export"):
        command = [sys.executable, str(ROOT / "extras" / "finished" / f"{name}.py"), str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("error: ") and "no checkpoint file" in done.stderr
