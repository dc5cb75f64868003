"""Scores and metrics of a fork, and which of its checkpoints is the best."""

import pytest
import torch
from torch import nn

from tests.configs import EXTENSIONS, checkpoint, composed, logged, metrics, train
from tests.training.extensions import Worst
from training.config import checked
from training.metrics import EpochMetrics
from training.processes import Processes
from training.tasks import Multilabel, Task


def falling(outputs, labels):
    """A score of each sample that falls while the network learns."""
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


class Listed(Worst):
    """A metric whose values are given."""

    def __init__(self, values, higher_is_better=None):
        super().__init__()
        self.values = iter(float(value) for value in values)
        self.higher_is_better = higher_is_better

    def compute(self):
        return next(self.values) if self.all.sum() == 64 else 0.0  # else it is the check before the first step


def score(name):
    """A function of a fork, beside a loss that is one of torch's."""
    loss = "task.loss={_target_: torch.nn.MultiMarginLoss} "
    return loss + f"task.scores={{{name}: {{_target_: {__name__}.falling}}}} task.metric={name}"


def listed(values):
    return f"task.metrics={{mine: {{_target_: {__name__}.Listed, {values}}}}} task.metric=mine"


@pytest.mark.parametrize(
    ("overrides", "lower"),
    [
        (score("MSE"), True),
        (score("mine") + " task.higher_is_better=true", False),
        (listed("values: [3, 2, 4], higher_is_better: false"), True),
        (listed("values: [nan, 0.5, nan]") + " task.higher_is_better=true", False),
    ],
)
def test_the_best_checkpoint_is_the_best_in_the_direction_that_is_known_or_given(tmp_path, overrides, lower):
    summary = train(tmp_path, overrides, "train.epochs=3 optim.lr=0.01")
    name = summary["score"]
    values = {line["step"]: line[name] for line in metrics(tmp_path) if name in line}
    assert summary["lower_is_better"] is lower and len(values) == 3 and "test_accuracy" in summary
    values = {step: value for step, value in values.items() if value is not None}  # NaN is never the best
    assert "best_score" not in summary, "which the test set would have chosen"
    assert checkpoint(tmp_path, "best")["step"] == (min if lower else max)(values, key=values.get)


class Collection(nn.ModuleDict):
    """Several metrics, as torchmetrics' MetricCollection has them."""

    def __init__(self):
        super().__init__()
        self["f1"] = nn.Identity()
        self["wer"] = nn.Identity()

    def update(self, outputs, labels):
        """Is not called here."""

    compute = reset = nn.Module.eval


def test_a_score_is_of_the_metric_in_a_collection_that_computes_it():
    section = {"all": {"_target_": f"{__name__}.Collection"}}
    found = EpochMetrics(section, Processes("cpu", checked(composed()).train), None)
    (collection,) = found.by_name.values()
    assert found.metric_of("all_wer") is collection["wer"]
    assert found.metric_of("all") is found.metric_of("all_other") is collection and found.metric_of("wer") is None


def test_a_metric_of_an_epoch_may_return_several_numbers_and_choose_the_best_checkpoint(tmp_path, caplog):
    several = f"task.metrics={{m: {{_target_: {EXTENSIONS}.Several}}}} task.metric=m_worst"
    summary = train(tmp_path, several, "train.epochs=3")
    assert 0 <= summary["test_m_worst"] <= 1 and summary["test_m_map"] == 0.5
    assert not {"test_m_classes", "test_m_name"} & summary.keys()
    warnings = [text for text in caplog.messages if "classes" in text and "name" in text]
    assert len(warnings) == 1, "one warning names what is left out, not one in each epoch"
    scores = logged(tmp_path, "test_m_worst")
    assert checkpoint(tmp_path, "best")["step"] == 8 * (1 + max(range(3), key=lambda i: (scores[i], i)))


class ManyLabels:
    """Each image may be dark, light, both or neither: labels are floats, as torch's losses take them."""

    classes = ("dark", "light")

    def __init__(self, train, **_):
        self.labels = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]] * 8).float()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.full((8, 8, 3), index, dtype=torch.uint8), self.labels[index]


def test_all_processes_have_the_numbers_of_the_first_as_a_metric_may_round_differently():
    first = {"mine": 0.5}
    processes = Processes("cpu", checked(composed()).train)
    section = {"mine": {"_target_": f"{EXTENSIONS}.Worst"}}
    ours = EpochMetrics(section, processes, Task(ManyLabels(train=True)))
    ours.update(torch.eye(10), torch.zeros(10, dtype=torch.int64))
    processes.gather = lambda value: [first] if isinstance(value, dict) else [value]
    assert ours.compute() == first


@pytest.mark.slow
def test_torchmetrics_computes_the_same_of_batches_of_one_sample_whose_logits_lie_in_0_to_1():
    pytest.importorskip("torchmetrics")
    section = {"map": {"_target_": "torchmetrics.classification.MultilabelAveragePrecision", "num_labels": 2}}
    logits = torch.tensor([[0.9, 0.2], [-3, 0.1], [0.3, 4], [0.1, -1]])
    labels = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]])
    values = []
    for size in (1, 4):
        kept = EpochMetrics(section, Processes("cpu", checked(composed()).train), Multilabel(ManyLabels(train=True)))
        for part in range(0, 4, size):
            kept.update(logits[part : part + size], labels[part : part + size])
        values.append(kept.compute()["map"])
    assert values[0] == values[1]


@pytest.mark.slow  # importing it takes most of it; `Listed` and `Several` have the same methods
def test_torchmetrics_of_many_labels_get_integers_and_the_loss_a_list_of_weights(tmp_path, error):
    pytest.importorskip("torchmetrics")
    many = f"data._target_={__name__}.ManyLabels task=multilabel train.batch_size=8"
    average = "task.metrics={map: {_target_: torchmetrics.classification.MultilabelAveragePrecision, num_labels: %d}}"
    weights = "task.loss={_target_: torch.nn.BCEWithLogitsLoss, pos_weight: [1, 5]} task.metric=map"
    assert 0 < train(tmp_path / "right", many, average % 2, weights)["test_map"] <= 1
    with error("^task.metrics.map: MultilabelAveragePrecision failed"):
        train(tmp_path / "wrong", many, average % 3)
