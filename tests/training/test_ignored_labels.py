"""Labels that the loss ignores (ignore_index) count nowhere: in no score, no mean, no class weight, no table."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import BCELoss, CrossEntropyLoss, MultiMarginLoss, functional

from tests.configs import IMAGES, SMALL, composed, metrics, steps, train
from tests.data.reading import refused
from tests.training.extensions import Images
from training.config import checked
from training.datasets import Datasets
from training.metrics import Means
from training.processes import Processes
from training.resume import Origin
from training.tasks import Classification, Regression

THREE = SimpleNamespace(classes=["a", "b", "c"], labels=[0, 0, 0, 1, 1, 2, 9, 9])
LOGITS = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 3, 1], [1, 0, 0]])
LABELS = torch.tensor([0, 1, 2, 9])
IGNORING = "task.loss={_target_: torch.nn.CrossEntropyLoss, ignore_index: 9}"


class HalfLabelled(Images):
    """Half of the samples have the label 9; of the test set all have it but the last."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        has_label = index % 4 < 2 if self.train else index == self.length - 1
        return image, label if has_label else 9


class Combined(torch.nn.Module):
    def __init__(self, ignored):
        super().__init__()
        self.ignore = ignored
        self.parts = torch.nn.ModuleList([CrossEntropyLoss(), CrossEntropyLoss(ignore_index=ignored)])


@given(st.integers(0, 255))
def test_the_label_is_found_inside_a_loss_that_consists_of_others(ignored):
    assert Classification(THREE, loss=Combined(ignored)).ignored == ignored
    assert Classification(THREE, loss=CrossEntropyLoss()).ignored == -100


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int64])
def test_no_label_of_a_narrow_dtype_is_taken_for_an_ignored_one(dtype):
    many = SimpleNamespace(classes=[*map(str, range(200))])
    labels = torch.tensor([156, 3]).to(dtype)  # -100 as uint8 is 156
    task = Classification(many, loss=CrossEntropyLoss())
    assert task.scored_mask(labels).tolist() == [True, True] and task.loss_denominator(labels) == 2
    task = Classification(many, loss=CrossEntropyLoss(weight=torch.ones(200), ignore_index=3))
    assert task.scored_mask(labels).tolist() == [True, False] and task.loss_denominator(labels) == 1


class WithLabels(HalfLabelled):
    """The same, with the array of all labels."""

    def __init__(self, train, **options):
        super().__init__(train, **options)
        self.labels = [self[index][1] for index in range(len(self))]


def test_labels_that_the_loss_ignores_are_not_mixed(tmp_path):
    with refused("augment.mixup, augment.cutmix: samples have the label 9, which the loss ignores, .* set both to 0"):
        train(tmp_path, IMAGES, f"data._target_={__name__}.WithLabels augment.mixup=0.2", IGNORING)


def means():
    processes = SimpleNamespace(device=torch.device("cpu"), gather=lambda value: [value], is_main=True)
    return Means(processes)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_a_score_is_the_mean_of_the_samples_whose_label_counts(shape):
    task = Classification(THREE, loss=CrossEntropyLoss(ignore_index=9))
    labels = LABELS.reshape(shape)
    ours = means()
    for _ in range(2):
        ours.add(4, {**task.all_scores(LOGITS, labels), "loss": torch.tensor(3.0)}, task.scored_mask(labels))
    ours.add(4, {"accuracy": torch.tensor([True] * 4), "loss": torch.tensor(0.0)}, task.scored_mask(labels * 0 + 9))
    assert ours.state_dict() == {"accuracy": (4.0, 6), "loss": (24.0, 12)}


@given(labels=st.lists(st.lists(st.sampled_from([0, 1, 2, 9]), min_size=3, max_size=3), min_size=2, max_size=6))
def test_a_score_of_pixels_is_the_mean_over_the_samples_of_those_whose_label_counts(labels):
    task = Classification(THREE, loss=CrossEntropyLoss(ignore_index=9))
    counted = [[label == 1 for label in sample if label != 9] for sample in labels]
    counted = [sample for sample in counted if sample]
    masks = torch.tensor(labels)[:, None]  # (B, 1, 3)
    ours = means()
    for part in (masks[:1], masks[1:]):
        scores = {"pixels": part == 1, "same": (part == 1).float(), "each": torch.ones(len(part)), "nan": part / 1.0}
        scores["nan"][part == 9] = math.nan
        ours.add(len(part), scores | {"loss": torch.tensor(2.0)}, task.scored_mask(part))
    sums = ours.state_dict()
    expected = sum(sum(sample) / len(sample) for sample in counted)
    assert sums["pixels"] == sums["same"] == (pytest.approx(expected), len(counted))
    assert sums["each"] == (len(counted), len(counted)) and sums["loss"] == (2 * len(labels), len(labels))
    assert math.isfinite(sums["nan"][0])


def test_shares_of_classes_and_other_losses_count_every_sample():
    assert Classification(THREE).scored_mask(LABELS) is None
    task = Classification(THREE, loss=CrossEntropyLoss(ignore_index=0))
    assert task.scored_mask(torch.eye(3)) is None


def test_a_run_counts_no_label_that_its_loss_ignores(tmp_path):
    """Of the first 15 test samples none has a label: a batch without any has no mean loss either."""
    own = f"data._target_={__name__}.HalfLabelled data.test_length=32 train.epochs=12 optim.lr=0.1"
    summary = train(tmp_path, IMAGES, own, IGNORING)
    assert summary["test_accuracy"] == 1.0 and summary["test_loss"] < 1
    last = [line for line in metrics(tmp_path) if "lr" in line][-1]
    assert last["accuracy"] == 1.0


class OneLabelled(Images):
    """Its first training sample alone has a label that counts."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, label if self.train and index == 0 else 9


def test_what_nothing_counts_for_is_no_number_and_never_the_best(tmp_path, caplog):
    settings = "train.epochs=4 train.log_interval=1 callbacks.best.early_stop=2 task.higher_is_better=true"
    summary = train(tmp_path, IMAGES, f"data._target_={__name__}.OneLabelled", IGNORING, settings)
    assert summary["test_loss"] is summary["test_accuracy"] is None and summary["epochs"] == 2
    assert "test_loss, test_accuracy is not finite (NaN, infinity, or no label counts)" in caplog.text
    assert not (tmp_path / "checkpoints" / "best.pt").exists()
    lines = steps(tmp_path)
    assert len(lines) == 8 and sum("loss" in line for line in lines) == sum("accuracy" in line for line in lines) == 2
    assert all(line["loss"] is not None for line in lines if "loss" in line)


def test_balanced_weights_count_no_ignored_label_and_reach_the_loss():
    loss = CrossEntropyLoss(ignore_index=9)
    task = Classification(THREE, loss=loss, class_weights="balanced")
    wanted = functional.cross_entropy(LOGITS, LABELS, torch.tensor([2 / 3, 1.0, 2.0]), ignore_index=9)
    assert torch.allclose(task.loss(LOGITS, LABELS), wanted)
    assert not task.state_dict(), "the weights are settings, not a state"


class Rare(Images):
    """Every eighth sample is light. The test set has the samples of the training set."""

    def __init__(self, train, length=64, **_):
        super().__init__(True, length)
        self.labels = [int(index % 8 == 5) for index in range(length)]

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        return image + 3 * index, self.labels[index]


class Splits(Rare):
    """Half of the samples of class 1 validate."""

    def __init__(self, train, **options):
        super().__init__(train, **options)
        self.is_val = [index % 16 == 5 for index in range(self.length)]


def test_balanced_weights_count_training_samples_alone():
    config = checked(composed(*SMALL, IMAGES, f"data._target_={__name__}.Splits task.class_weights=balanced"))
    data = Datasets(config, Origin(), Processes("cpu", config.train))
    assert data.task.own_loss.weight.tolist() == pytest.approx([60 / (2 * 56), 60 / (2 * 4)])


@pytest.mark.parametrize("weights", ["balanced", "[1,20]"])
def test_weighted_losses_of_the_same_samples_are_equal_in_training_and_test_and_for_torchs_loss(tmp_path, weights):
    rare = f"data._target_={__name__}.Rare task.label_smoothing=0 task.class_weights={weights} optim.lr=0"
    losses = []
    for loss in ("null", "{_target_: torch.nn.CrossEntropyLoss}"):
        for parts in (1, 3):
            folder = tmp_path / f"{loss} {parts}"
            summary = train(folder, IMAGES, rare, f"task.loss={loss} train.accumulate={parts} train.log_interval=100")
            losses += [summary["test_loss"], steps(folder)[-1]["loss"]]
    assert losses == pytest.approx([losses[0]] * 8, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (BCELoss(), "task.loss is BCELoss.*CrossEntropyLoss"),
        (functional.cross_entropy, "task.loss is function"),
        (MultiMarginLoss(weight=torch.ones(3)), "`weight` of MultiMarginLoss in task.loss"),
    ],
)
def test_class_weights_that_the_loss_would_not_get_are_a_sentence(loss, said):
    with refused(said):
        Classification(THREE, loss=loss, class_weights=[1, 2, 3])


class Sentinel(Regression):
    """-999 and NaN are numbers that were not measured."""

    def scored_mask(self, labels):
        return (labels != -999) & ~labels.isnan()


@pytest.mark.parametrize("missing", [-999.0, math.nan])
@given(rows=st.lists(st.lists(st.floats(-9, 9) | st.none(), min_size=3, max_size=3), min_size=1, max_size=6))
def test_numbers_that_were_not_measured_count_in_no_score_of_regression(missing, rows):
    mask = torch.tensor([[number is not None for number in row] for row in rows])
    labels = torch.tensor([[missing if number is None else number for number in row] for row in rows])
    task = Sentinel(None, numbers=3)
    ours = means()
    ours.add(len(rows), task.all_scores(torch.zeros(len(rows), 3), labels), task.scored_mask(labels))
    measured = [row[counts] for row, counts in zip(labels.abs(), mask, strict=True) if counts.any()]
    expected = sum(row.mean() for row in measured) / len(measured) if measured else None
    assert ours.read().get("mae") == (None if expected is None else pytest.approx(expected.item(), rel=1e-5, abs=1e-6))
