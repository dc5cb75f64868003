"""The callback warns of losses whose parts have another gradient, and of no other ones."""

import os

import pytest
import torch
from torch.nn import functional

from tests.configs import FAST, train, untimed
from tests.training.test_torchrun import Run
from training.trainer import Trainer

NAME = __name__.rpartition(".")[2]
CLASSES = 10


def masked(outputs, labels):
    """A mean over the labels that are not 3, of which nothing knows."""
    return functional.cross_entropy(outputs, labels, ignore_index=3)


def weighted(outputs, labels):
    """A mean that divides by weights, of which nothing knows."""
    return functional.cross_entropy(outputs, labels, torch.arange(1.0, CLASSES + 1))


def contrastive(outputs, labels):
    """The mean loss of telling each sample from the others of its batch."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def weighted_in_second_process(outputs, labels):
    return weighted(outputs, labels) if os.environ["RANK"] == "1" else functional.cross_entropy(outputs, labels)


def pairs(outputs, labels):
    """Of each sample with the next one: a single sample has none."""
    return functional.mse_loss(outputs[:-1], outputs[1:], reduction="sum") / (len(outputs) - 1)


class Weighted(Trainer):
    """Its loss divides by weights."""

    def training_step(self, batch):
        losses = functional.cross_entropy(self.model(batch["image"]), batch["label"], reduction="none")
        weights = 1.0 + batch["label"]
        return (weights * losses).sum() / weights.sum()


def own(name):
    return f"{{_target_: {NAME}.{name}, _partial_: true}}"


def torchs(name, **options):
    settings = "".join(f", {key}: {value}" for key, value in options.items())
    return f"{{_target_: torch.nn.{name}{settings}}}"


def check_that_nothing_changes(folder, *settings):
    """A run with the callback is the one without it."""
    for callbacks in ("best", "best,parts"):
        train(folder / callbacks, *FAST, "train.accumulate=2", *settings, f"callbacks/standard=[{callbacks}]")
    assert untimed(folder / "best") == untimed(folder / "best,parts")


@pytest.mark.parametrize("loss", [masked, weighted, contrastive, pairs])
def test_a_loss_whose_parts_do_not_add_up_is_warned_of_once_and_only_if_batches_are_divided(tmp_path, caplog, loss):
    for parts in (1, 2):
        train(
            tmp_path / str(parts),
            *FAST,
            f"task.loss={own(loss.__name__)} train.accumulate={parts} callbacks/standard=[parts]",
        )
        assert caplog.text.count("loss_denominator") == parts - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "task.loss={_target_: extras.parts.tests.test_parts.weighted_in_second_process, _partial_: true}",
        "trainer._target_=extras.parts.tests.test_parts.Weighted",
    ],
)
def test_two_processes_warn_once_also_if_the_samples_of_one_alone_show_it(tmp_path, python, setting):
    run = Run(python, tmp_path, setting, "callbacks/standard=[parts] train.max_steps=1").finish()
    assert run.text.count("is not that of the whole batch") == 1


@pytest.mark.parametrize("parts", [1, 2])
def test_a_training_step_of_ones_own_is_said_not_to_be_checked_once_and_only_if_batches_are_divided(
    tmp_path, caplog, parts
):
    own_step = f"trainer._target_={NAME}.Weighted train.accumulate={parts} callbacks/standard=[parts]"
    train(tmp_path, *FAST, own_step)
    assert sum("Weighted.training_step" in text for text in caplog.messages if "parts" in text) == parts - 1


@pytest.mark.parametrize(
    "loss",
    [
        "null",
        torchs("CrossEntropyLoss", reduction="sum"),
        torchs("CrossEntropyLoss", ignore_index=3),
        torchs("CrossEntropyLoss", weight=[*range(1, CLASSES + 1)]),
        torchs("MultiMarginLoss"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_whose_parts_add_up_is_not_warned_of_and_nothing_else_changes(tmp_path, caplog, loss, precision):
    check_that_nothing_changes(tmp_path, f"task.loss={loss} train.precision={precision} model=small_cnn model.width=4")
    assert "loss_denominator" not in caplog.text


class Differentiates(torch.nn.Linear):
    """Its outputs contain gradients, which can be trained on in training mode alone."""

    def __init__(self, **_):
        super().__init__(3 * 64, CLASSES)

    def forward(self, images):
        with torch.enable_grad():
            pixels = images.detach().flatten(1).requires_grad_()
            outputs = super().forward(pixels)
            (gradient,) = torch.autograd.grad(outputs.square().sum(), pixels, create_graph=self.training)
        return outputs + gradient.mean(1, keepdim=True)


def test_a_network_without_a_gradient_in_evaluation_mode_is_not_compared_and_nothing_else_changes(tmp_path, caplog):
    check_that_nothing_changes(tmp_path, f"model={{_target_: {NAME}.Differentiates}}")
    (record,) = (record for record in caplog.records if "gradients of parts" in record.getMessage())
    assert "Differentiates raises RuntimeError" in record.getMessage() and record.exc_info is None
