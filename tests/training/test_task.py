"""Tasks alone: losses, scores and what does not fit."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from data.errors import DataError
from training.tasks import Classification, Multilabel, Regression

THREE = SimpleNamespace(classes=("a", "b", "c"), labels=[0, 0, 0, 1, 1, 2])
MANY = SimpleNamespace(classes=[str(number) for number in range(20)])
LOGITS = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 3, 1]])
LABELS = torch.tensor([0, 1, 2])


def values(scores: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: value.float().tolist() for name, value in scores.items()}


def test_classification_counts_the_labels_that_have_the_largest_logit():
    task = Classification(THREE)
    assert values(task.scores(LOGITS, LABELS)) == {"accuracy": [1, 1, 0]}
    assert torch.equal(task.loss(LOGITS, LABELS), functional.cross_entropy(LOGITS, LABELS))
    assert task.predictions(LOGITS).sum(dim=1).allclose(torch.ones(3))
    mixed = torch.tensor([[0.4, 0.6, 0], [0, 1, 0], [0, 0, 1]])
    assert values(task.scores(LOGITS, mixed)) == {"accuracy": [0, 1, 0]}


def test_labels_are_smoothed_and_classes_weighted():
    smooth = Classification(THREE, label_smoothing=0.5)
    assert torch.equal(smooth.loss(LOGITS, LABELS), functional.cross_entropy(LOGITS, LABELS, label_smoothing=0.5))
    for given, weights in (("balanced", [2 / 3, 1.0, 2.0]), ([1, 0, 4], [1.0, 0.0, 4.0])):
        task = Classification(THREE, class_weights=given)
        weighted = functional.cross_entropy(LOGITS, LABELS, torch.tensor(weights), reduction="sum") / 3
        assert torch.allclose(task.loss(LOGITS, LABELS), weighted)
        parts = task.loss(LOGITS[:2], LABELS[:2]) * 2 / 3 + task.loss(LOGITS[2:], LABELS[2:]) / 3
        assert torch.allclose(parts, weighted)  # whatever the parts of a batch


def test_with_many_classes_the_best_five_are_scored_too():
    logits = torch.arange(20.0).repeat(2, 1)
    assert values(Classification(MANY).scores(logits, torch.tensor([15, 14]))) == {"accuracy": [0, 0], "top5": [1, 0]}


def test_multilabel_scores_each_samples_own_classes():
    task = Multilabel(THREE)
    logits, labels = (
        torch.tensor([[1.0, 1, -1], [-1, -1, -1], [1, -1, -1]]),
        torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 0]]),
    )
    scores = values(task.scores(logits, labels))
    assert scores["f1"] == pytest.approx([2 / 3, 1, 0]) and scores["exact"] == [0, 1, 0]
    assert task.loss(logits, labels) == functional.binary_cross_entropy_with_logits(logits, labels.float())


def test_regression_takes_labels_with_and_without_a_dimension_of_their_own():
    task = Regression(THREE)
    outputs = torch.tensor([[1.0], [2.0]])
    for labels in (torch.tensor([2, 2]), torch.tensor([[2.0], [2.0]], dtype=torch.float64)):
        assert task.loss(outputs, labels) == 0.5
        assert values(task.scores(outputs, labels)) == {"mae": [1, 0], "mse": [1, 0]}
        task.check(outputs, labels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_labels_may_have_any_integer_dtype(dtype):
    labels = LABELS.to(dtype)
    Classification(THREE).check(LOGITS, labels)
    assert Classification(THREE).loss(LOGITS, labels) == Classification(THREE).loss(LOGITS, LABELS)


def test_a_custom_loss_replaces_the_tasks_own_and_custom_scores_are_added():
    far = {"far": lambda outputs, labels: (outputs - labels) > 3}
    task = Regression(THREE, loss=torch.nn.L1Loss(reduction="none"), scores=far, metric="far", higher_is_better=True)
    outputs, labels = torch.tensor([[1.0], [6.0]]), torch.tensor([2.0, 2.0])
    assert task.loss(outputs, labels) == 2.5
    assert values(task.scores(outputs, labels))["far"] == [0, 1]
    assert (task.metric, task.higher_is_better) == ("far", True) and not Regression(THREE).higher_is_better


def test_a_score_that_is_a_mean_over_samples_is_refused():
    task = Regression(THREE, scores={"mean": lambda outputs, labels: (outputs - labels).mean()})
    with pytest.raises(DataError, match=r"task\.scores\.mean returned a tensor of shape \(\) for 2 samples"):
        task.scores(torch.zeros(2, 1), torch.zeros(2))


def test_a_later_label_that_is_out_of_range_is_named():
    with pytest.raises(DataError, match="has the label 9: labels go from 0 to 2, as there are 3 classes"):
        Classification(THREE).loss(LOGITS, torch.tensor([0, 9, 1]))


@pytest.mark.parametrize(
    ("task", "outputs", "labels", "sentence"),
    [
        (Classification(THREE), torch.zeros(2, 1000), LABELS[:2], r"\(2, 1000\), and Classification .* \(2, 3\)"),
        (Classification(THREE), torch.zeros(2), LABELS[:2], r"outputs of shape \(2,\)"),
        (Classification(THREE), (LOGITS,), LABELS, r"outputs of tuple, and Classification needs a tensor \(3, 3\)"),
        (Classification(THREE), LOGITS, torch.tensor([0, 1, 3]), r"label 3: labels go from 0 to 2"),
        (Classification(THREE), LOGITS, torch.tensor([0, 1, -1]), r"label -1: labels go from 0 to 2"),
        (Classification(THREE), LOGITS, None, r"task\.label=null: Classification needs labels: name their field, or"),
        (Multilabel(THREE), LOGITS, LABELS, r"labels of shape \(\): task=multilabel needs \(3,\)"),
        (
            Regression(THREE, numbers=2),
            torch.zeros(3, 2),
            LABELS,
            r"shape \(\), which are not task\.numbers=2 numbers",
        ),
    ],
)
def test_outputs_and_labels_that_do_not_fit_are_refused_in_a_sentence(task, outputs, labels, sentence):
    with pytest.raises(DataError, match=sentence):
        task.check(outputs, labels)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Classification(SimpleNamespace()), "has no `classes`: give it a list of their names"),
        (lambda: Multilabel(SimpleNamespace()), "has no `classes`"),
        (lambda: Classification(THREE, class_weights=[1, 2]), r"class_weights=\[1, 2\]: give balanced, or a number"),
        (lambda: Classification(MANY, class_weights="balanced"), "has no array `labels`"),
        (lambda: Classification(THREE, scores={"loss": len}), "the loss itself has this name"),
    ],
)
def test_arguments_that_cannot_work_are_refused_in_a_sentence(make, sentence):
    with pytest.raises(DataError, match=sentence):
        make()
