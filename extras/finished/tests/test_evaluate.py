"""scripts/evaluate.py, and what a finished run refuses."""

import json
import shutil

import numpy as np
import pytest
import torch

from data.fashion import CLASSES, FashionMini
from models.small_cnn import SmallCNN
from scripts import evaluate
from scripts.command import run_script
from training.config import ConfigError
from training.data_spec import DataSpec
from training.finished.evaluation import MISTAKES, Evaluation
from training.finished.finished_run import FinishedRun, find

HERE = "loader.num_workers=0"


def changed(trained, folder, change):
    """A copy of the run with one checkpoint, in which `change` has changed the state."""
    state = torch.load(trained / "checkpoints" / "best.pt", weights_only=True)
    change(state)
    (folder / "checkpoints").mkdir(parents=True)
    torch.save(state, folder / "checkpoints" / "step-0000001.pt")
    return folder


def test_the_accuracy_is_that_of_the_run_and_all_is_written(trained, tmp_path, capsys):
    result = evaluate.main([str(trained), HERE, "--out", str(tmp_path)])
    assert result["accuracy"] == json.loads((trained / "summary.json").read_text())["test_accuracy"]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result
    for name in ("confusion.png", "mistakes.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "precision" in printed and "class 5" in printed and "of 40 images (test)" in printed


def test_the_table_and_the_mistakes_are_those_of_the_predictions():
    spec = DataSpec({}, ["a", "b", "c"], {}, shape=[1, 1, 1], mean=[0.5], std=[0.25], images=["image"])
    evaluation = Evaluation(spec)
    images = torch.tensor([0.0, 51.0, 102.0, 255.0]).view(4, 1, 1, 1)
    probabilities = torch.tensor([[0.8, 0.2, 0.0], [0.9, 0.1, 0.0], [0.4, 0.6, 0.0], [0.6, 0.4, 0.0]])
    evaluation.add((images / 255 - 0.5) / 0.25, torch.tensor([0, 1, 1, 1]), probabilities)
    a, b, c = evaluation.by_class()
    assert (a["images"], a["precision"], a["recall"], a["f1"]) == (1, 1 / 3, 1.0, 0.5)
    assert (b["images"], b["precision"], b["recall"], b["f1"]) == (3, 1.0, 1 / 3, 0.5)
    assert c == {"class": "c", "images": 0, "precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert [int(mistake.image.item()) for mistake in evaluation.mistakes] == [51, 255], "the least probable first"
    assert evaluation.mistakes[0].predicted_probability == pytest.approx(0.9)


def test_only_the_worst_mistakes_of_all_batches_are_kept():
    evaluation = Evaluation(
        DataSpec({}, ["a", "b"], {}, shape=[1, 1, 3], mean=[0.0] * 3, std=[1.0] * 3, images=["image"])
    )
    of_truth = torch.from_numpy(np.random.default_rng(0).permutation(60) / 200)
    for part in of_truth.split(30):
        evaluation.add(torch.zeros(30, 3, 1, 1), torch.zeros(30).long(), torch.stack([part, 1 - part], dim=1))
    assert [mistake.truth_probability for mistake in evaluation.mistakes] == sorted(of_truth.tolist())[:MISTAKES]


def test_training_images_are_evaluated_without_augmentation(trained, tmp_path):
    def on_fashion(state):
        state["config"]["data"] = {"_target_": "data.fashion.FashionMini", "pad": 2, "flip": True}
        state["config"]["data"] |= {"val_fraction": 0.0, "collate": None}
        state["data_spec"] |= {"shape": [28, 28, 1], "classes": CLASSES}
        state["data_spec"]["model_options"] = {"num_classes": 10, "in_channels": 1}
        state["model"] = small_cnn.state_dict()

    small_cnn = SmallCNN(num_classes=10, in_channels=1)
    dataset = FinishedRun(changed(trained, tmp_path, on_fashion)).dataset("train")
    plain = FashionMini(train=True, pad=0, flip=False)
    assert all(torch.equal(dataset[index]["image"], plain[index]["image"]) for index in range(50))


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("data.num_classes=7", r"knows 6 classes, and these data have 7; the first .* is none .* class 6 in"),
        ("data.image_size=9", r"takes images of \(height, width, channels\) \(8, 8, 3\) .* \(9, 9, 3\)"),
        ("data.lenght=3", "there is no key data.lenght; did you mean data.length"),
        ("train.batch_size=many", "train.batch_size=many: it takes an integer"),
        ("data.root", "an override looks like"),
        ("model=resnet18", r"does not fit this run's ResNet: .* is .* in the checkpoint"),
    ],
)
def test_an_override_that_cannot_work_ends_in_a_sentence(trained, override, sentence):
    with pytest.raises(ConfigError, match=sentence):
        FinishedRun(trained, [override]).dataset("test")
    assert len(FinishedRun(trained, ["data.test_length=3"]).dataset("test")) == 3


def test_the_best_checkpoint_is_used_else_the_newest(trained, tmp_path):
    assert find(trained)[0].name == "best.pt"
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained / "checkpoints", folder, symlinks=True)
    newest = next(folder.glob("step-*.pt")).rename(folder / "step-0000099.pt")  # best.pt leads nowhere now
    assert find(tmp_path)[0] == newest == find(newest)[0]
    newest.unlink()
    with pytest.raises(
        ConfigError, match=r"has no checkpoints/step-\*\.pt: give a checkpoint file or the folder of a"
    ):
        find(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        find(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: state["config"]["data"].update(new_key=1), r"data: data\.synthetic\.Synthetic\(.*new_key"),
        (lambda state: state.pop("data_spec"), "another version of this repository, and lacks 'data_spec'"),
        (lambda state: state["data_spec"].pop("dataset"), r"lacks .* 'dataset': use that version, or train"),
        (
            lambda state: state["data_spec"]["classes"].append("one more"),
            r"^\S+ does not fit this run's SmallCNN: classifier\.bias is \(6,\)",
        ),
        (
            lambda state: state["data_spec"]["model_options"].update(checkpoint_path="weights.pth"),
            r"data_spec\.model_options\.checkpoint_path=weights\.pth could load code",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_or_loads_from_elsewhere_is_refused(trained, tmp_path, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        FinishedRun(changed(trained, tmp_path, change)).dataset("test")


def test_averaged_weights_are_used_if_the_run_has_them(trained, tmp_path):
    def average(state):
        state["ema"] = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}

    run = FinishedRun(changed(trained, tmp_path, average))
    assert not any(parameter.any() for parameter in run.model.parameters())


def test_a_script_ends_in_one_sentence(trained, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run_script(lambda: evaluate.main([str(tmp_path)]))
    assert str(end.value).startswith("error: ") and "has no checkpoints" in str(end.value)
    with pytest.raises(ZeroDivisionError):
        run_script(lambda: 1 / 0)


def test_a_task_without_classes_has_scores_alone(trained, tmp_path):
    def regress(state):
        state["config"]["task"] = {"_target_": "training.tasks.Regression", "numbers": 1}
        state["data_spec"]["model_options"]["num_classes"] = 1
        state["model"] = SmallCNN(1, 3).state_dict()

    run, out = changed(trained, tmp_path / "run", regress), tmp_path / "out"
    result = evaluate.main([str(run), HERE, "--out", str(out)])
    assert {"mae", "mse"} < result.keys() and [path.name for path in out.iterdir()] == ["evaluation.json"]


@pytest.mark.parametrize("section", ["data", "model"])
def test_a_run_that_names_foreign_code_is_refused_before_it_is_imported(trained, tmp_path, monkeypatch, section):
    def attack(state):
        state["config"][section] |= {"nested": {"_target_": "evil.Evil"}}

    (tmp_path / "evil.py").write_text("raise SystemExit('this is the attack')")
    monkeypatch.syspath_prepend(tmp_path)
    run = changed(trained, tmp_path / "run", attack)
    with pytest.raises(ConfigError, match=rf"{section}\.nested\._target_=evil\.Evil is not in .* add --trust evil$"):
        FinishedRun(run)
    with pytest.raises(SystemExit, match="this is the attack"):
        FinishedRun(run, trusted=["evil"])
