"""Tasks, networks, losses and scores of a fork, and what is frozen: one small run each."""

import pytest
import torch
from torch import nn

from tests.configs import LINEAR, checkpoint, differences, metrics, steps, train
from training.tasks import Task

HERE = __name__


class Mapped(Task):
    """For networks that return a dict."""

    metric, higher_is_better = "right", True

    def __init__(self, dataset: object, **options: object) -> None:
        super().__init__(dataset, **options)
        self.num_outputs = 10

    def loss(self, outputs: dict, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels)

    def scores(self, outputs: dict, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"right": outputs["logits"].argmax(1) == labels}


class ReturnsDict(nn.Module):
    def __init__(self, num_classes: int, in_channels: int, **_: object) -> None:
        super().__init__()
        self.layer = nn.Linear(64 * in_channels, num_classes)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(images.flatten(1))}


def test_a_task_and_a_network_of_a_fork_may_use_outputs_of_any_kind(tmp_path):
    mapped = ["task=own", f"task._target_={HERE}.Mapped", "task.label=label", "task.metric=null"]
    summary = train(tmp_path, f"model._target_={HERE}.ReturnsDict", *mapped, "optim.lr=0.05")
    assert summary["test_loss"] < 2.3 and summary["test_right"] > 0.3


def sure(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.softmax(dim=1).amax(dim=1)


def test_a_loss_and_more_scores_may_be_functions_of_a_fork(tmp_path):
    own = ["task.loss={_target_: torch.nn.MultiMarginLoss}", f"task.scores={{sure: {{_target_: {HERE}.sure}}}}"]
    summary = train(tmp_path, LINEAR, *own, "task.metric=sure", "task.higher_is_better=true")
    assert 0.1 <= summary["test_sure"] <= 1 and "test_accuracy" in summary
    values = [line["test_sure"] for line in metrics(tmp_path) if "test_sure" in line]
    assert checkpoint(tmp_path, "best")["step"] == (8 if values[0] > values[1] else 16)


def test_a_rare_class_counts_more_if_class_weights_are_balanced(tmp_path):
    skewed = [f"data._target_={HERE}.Skewed", LINEAR, "data.length=64", "optim.lr=0", "task.label_smoothing=0"]
    for name in ("null", "balanced"):
        train(tmp_path / name, *skewed, f"task.class_weights={name}", "train.epochs=1", "train.log_interval=1")
    plain, balanced = ([line["loss"] for line in steps(tmp_path / name)] for name in ("null", "balanced"))
    assert sum(plain) == pytest.approx(2 * 0.6931, rel=0.3) and plain != balanced


class Skewed:
    """A quarter of the labels is 1. It has their array, from which the weights are computed."""

    classes = ("often", "rare")

    def __init__(self, train: bool, length: int, **_: object) -> None:
        self.labels = torch.arange(length) % 4 // 3

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return {"image": torch.rand(3, 8, 8), "label": int(self.labels[index])}


def test_what_train_freeze_names_keeps_its_weights_and_statistics(tmp_path):
    for number, steps_ in enumerate((1, 8)):
        train(tmp_path / str(number), "train.freeze=backbone", f"train.max_steps={steps_}")
    one, more = (checkpoint(tmp_path / str(number))["model"] for number in (0, 1))
    assert differences(one, more) == [".classifier.bias", ".classifier.weight"]


def test_a_batch_norm_without_gradient_that_is_not_frozen_updates_its_statistics(tmp_path):
    train(tmp_path, f"model._target_={HERE}.Following", "train.max_steps=5")
    assert checkpoint(tmp_path)["model"]["norm.num_batches_tracked"] == 5


class Following(nn.Sequential):
    """Normalises with a module that is not trained, as MoCo's key network is."""

    def __init__(self, num_classes: int, in_channels: int, **_: object) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels).requires_grad_(False)
        self.rest = nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, num_classes))
