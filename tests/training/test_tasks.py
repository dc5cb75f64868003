"""Tasks alone: losses and scores."""

import math
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import default_collate

from tests.data.reading import refused
from training.checks import check_batch, check_dataset, check_labels
from training.parts import rows_of
from training.tasks import RENAMED, Classification, Multilabel, Regression, Task

THREE = SimpleNamespace(classes=("a", "b", "c"), labels=[0, 0, 0, 1, 1, 2])
LOGITS = torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 3, 1]])
LABELS = torch.tensor([0, 1, 2])


def values(scores):
    return {name: value.float().tolist() for name, value in scores.items()}


def test_classification_counts_the_labels_that_have_the_largest_logit():
    task = Classification(THREE)
    assert values(task.scores(LOGITS, LABELS)) == {"accuracy": [1, 1, 0]}
    assert torch.equal(task.loss(LOGITS, LABELS), functional.cross_entropy(LOGITS, LABELS))
    assert task.predictions(LOGITS).sum(dim=1).allclose(torch.ones(3))
    mixed = torch.tensor([[0.4, 0.6, 0], [0, 1, 0], [0, 0, 1]])
    assert values(task.scores(LOGITS, mixed)) == {"accuracy": [0, 1, 0]}


def test_a_namedtuple_with_the_names_of_the_fields_is_taken_by_these():
    task = Classification(THREE)
    labels_first = namedtuple("Batch", "label path image")(LABELS, ["a", "b", "c"], LOGITS)
    batch = task.to_dict(labels_first)
    assert list(batch) == ["label", "path", "image"] and batch["image"] is LOGITS
    others = namedtuple("Batch", "data target")(LOGITS, LABELS)
    assert task.to_dict(others) == {"image": LOGITS, "label": LABELS}


@pytest.mark.parametrize(("labels", "named"), [([0, math.nan, 1], "nan"), ([0, 1.5, 1], "1.5"), ([0, 1, 2], "0.0")])
def test_a_label_that_makes_floats_of_the_numbers_of_classes_is_named(labels, named):
    with refused(f"a label is {named}: give the numbers of classes, integers from 0 to 2"):
        Classification(THREE).all_scores(LOGITS, torch.tensor(labels, dtype=torch.float64))
    with refused(f"a label is {named}: give the numbers of classes, integers from 0 to 2"):
        Classification(THREE).loss(LOGITS, torch.tensor(labels, dtype=torch.float64)[:, None])


def test_torchmetrics_cannot_take_the_logits_of_a_small_batch_for_probabilities():
    logits = torch.tensor([[0.1, 0.9, 0.4]])
    assert torch.equal(Multilabel(THREE).for_torchmetrics(logits), logits.sigmoid())
    of_classes = Classification(THREE).for_torchmetrics(logits)
    assert (of_classes < 0).all() and of_classes.softmax(1).allclose(logits.softmax(1))


def test_labels_are_smoothed_and_classes_weighted_whatever_the_parts_of_a_batch():
    smooth = Classification(THREE, label_smoothing=0.5)
    wanted = functional.cross_entropy(LOGITS, LABELS, label_smoothing=0.5)
    assert torch.allclose(smooth.loss(LOGITS, LABELS), wanted)
    for given, weights in (("balanced", [2 / 3, 1.0, 2.0]), ([1, 0, 4], [1.0, 0.0, 4.0])):
        task = Classification(THREE, class_weights=given)
        weighted = functional.cross_entropy(LOGITS, LABELS, torch.tensor(weights))
        assert torch.allclose(task.loss(LOGITS, LABELS), weighted)
        parts = [
            (task.loss(LOGITS[rows], LABELS[rows]), task.loss_denominator(LABELS[rows])) for rows in ([0, 1], [2])
        ]
        assert torch.allclose(sum(loss * share for loss, share in parts) / sum(weights), weighted)


def test_balanced_weights_are_those_of_labels_of_any_kind_that_training_takes():
    labels = np.array(THREE.labels)
    kinds = [*map(labels.astype, ("u2", ">i4", object)), labels[:, None], np.eye(3)[labels]]
    kinds += [tuple(THREE.labels), list(torch.tensor(labels)), torch.tensor(labels).to(torch.uint32)]
    for kind in (*kinds, pytest.importorskip("pandas").Series(labels, labels + 7)):
        first = default_collate([kind.iloc[row] if hasattr(kind, "iloc") else kind[row] for row in (0, 5)])
        data = SimpleNamespace(classes=THREE.classes, labels=kind)
        task = Classification(data, class_weights="balanced")
        batch = {"image": first, "label": first}
        check_batch(batch, batch, data, task)
        assert task.own_loss.weight.tolist() == pytest.approx([2 / 3, 1.0, 2.0])
    one_hot = SimpleNamespace(classes=THREE.classes, labels=np.eye(3, dtype=int)[labels])
    assert Classification(one_hot, class_weights="balanced").own_loss.weight.tolist() == pytest.approx([2 / 3, 1, 2])
    two = SimpleNamespace(classes=("a", "b"), labels=np.array([True, False, True, True]))
    assert Classification(two, class_weights="balanced").own_loss.weight.tolist() == pytest.approx([2, 2 / 3])


def test_a_class_without_samples_has_no_weight_and_is_named(caplog):
    two_of_three = SimpleNamespace(classes=THREE.classes, labels=np.array([0, 0, 0, 1]))
    assert Classification(two_of_three, class_weights="balanced").own_loss.weight.tolist() == pytest.approx(
        [4 / 9, 4 / 3, 0]
    )
    assert "no sample of 1 of the 3 classes" in caplog.text


@pytest.mark.parametrize("largest", [10.0, 40.0])
def test_weights_with_which_smoothed_labels_make_a_rare_class_win_are_warned_of(caplog, largest):
    weights = torch.tensor([1.0, 1.0, largest])
    Classification(THREE, label_smoothing=0.1, class_weights=weights.tolist())
    label = torch.tensor([0])
    costs = [functional.cross_entropy(4 * torch.eye(3)[[row]], label, weights, label_smoothing=0.1) for row in (0, 2)]
    assert (costs[0] > costs[1]) == ("label smoothing" in caplog.text) == (largest == 40)
    assert not Classification(THREE, class_weights=weights.tolist()).smoothing


def test_class_weights_beside_a_default_loss_of_a_subclass_are_refused():
    class Focal(Classification):
        def default_loss(self, outputs, labels):
            return outputs.sum()

    with refused("task.class_weights: Focal has its own default_loss"):
        Focal(THREE, class_weights=[1, 2, 3])


@pytest.mark.parametrize(
    ("labels", "weights", "said"),
    [
        (None, "balanced", "`labels`"),
        (np.array([0.5, 1.5]), "balanced", "`labels` of .*0 to 2"),
        (["a", "b"], "balanced", "0 to 2"),
        ([0, 1], "balance", "task.class_weights=balance"),
        ([0, 1], [1, -1, 1], "task.class_weights=-1.0"),
    ],
)
def test_class_weights_that_cannot_be_are_a_sentence(labels, weights, said):
    data = SimpleNamespace(classes=np.array(THREE.classes))
    if labels is not None:
        data.labels = labels
    with refused(said):
        Classification(data, class_weights=weights)


def test_a_single_class_is_warned_of_unless_a_loss_of_ones_own_may_learn_from_it(caplog):
    one = SimpleNamespace(classes=["defect"])
    Classification(one, loss=functional.mse_loss)
    assert not caplog.text
    Classification(one)
    assert "only one class, defect: there is nothing to learn" in caplog.text


def test_with_many_classes_the_best_five_are_scored_too():
    many = SimpleNamespace(classes=[str(number) for number in range(20)])
    logits = torch.arange(20.0).repeat(2, 1)
    assert values(Classification(many).scores(logits, torch.tensor([15, 14]))) == {"accuracy": [0, 0], "top5": [1, 0]}


@pytest.mark.parametrize("loss", [torch.nn.BCELoss(), partial(functional.binary_cross_entropy, reduction="sum")])
def test_a_loss_of_probabilities_is_refused_where_scores_take_logits(loss):
    with refused("BCEWithLogitsLoss"):
        Multilabel(THREE, loss=loss)


class Partial(Multilabel):
    """Of some classes it is not known whether a sample has them: their label is -1."""

    def scored_mask(self, labels):
        return labels >= 0


def test_labels_of_multilabel_that_are_no_shares_are_refused_unless_a_task_leaves_them_out():
    labels = torch.tensor([[1, -1, 0], [0, 1, -1]])
    batch = {"image": LOGITS[:2], "label": labels}
    data = SimpleNamespace(classes=THREE.classes, labels=labels.numpy())
    for check in (lambda task: check_batch(batch, batch, None, task), lambda task: check_labels(data, task)):
        check(Partial(THREE))
        with refused(r"the label -1.*scored_mask"):
            check(Multilabel(THREE))
    task = Partial(THREE)
    logits = torch.tensor([[1.0, 1, -1], [-1, 1, 1]])
    assert values(task.scores(logits, labels)) == {"f1": [1, 1], "exact": [1, 1]}
    assert torch.equal(task.for_metrics(logits, labels)[1], labels)
    assert values(task.scores(-logits, labels)) == {"f1": [0, 0], "exact": [0, 0]}


@pytest.mark.parametrize("unknown", [-1.0, 255.0, torch.nan])
def test_a_multilabel_sample_with_a_label_that_is_no_share_is_refused_among_the_first_and_later_has_no_score(unknown):
    labels = torch.tensor([[1, unknown, 0], [0, 1, 1]])
    batch = {"image": LOGITS[:2], "label": labels}
    with refused(r"the label (-1|255|nan).*scored_mask"):
        check_batch(batch, batch, None, Multilabel(THREE))
    for scores in values(Multilabel(THREE).scores(LOGITS[:2], labels)).values():
        assert math.isnan(scores[0]) and 0 <= scores[1] <= 1


def test_multilabel_scores_each_samples_own_classes():
    task = Multilabel(THREE)
    logits = torch.tensor([[1.0, 1, -1], [-1, -1, -1], [1, -1, -1]])
    labels = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 0]])
    scores = values(task.scores(logits, labels))
    assert scores["f1"] == pytest.approx([2 / 3, 1, 0]) and scores["exact"] == [0, 1, 0]
    assert task.loss(logits, labels) == functional.binary_cross_entropy_with_logits(logits, labels.float())
    for given in (labels, labels.float(), labels.bool()):
        assert torch.equal(task.for_metrics(logits, given)[1], labels)


@pytest.mark.parametrize("numbers", [(2,), (2, 1), (2, 1, 1)])
def test_regression_takes_outputs_and_labels_with_and_without_a_dimension_of_their_own(numbers):
    task = Regression(THREE)
    for shape in ((2,), (2, 1), (2, 1, 1)):
        outputs = torch.tensor([1.0, 2.0]).view(numbers)
        labels = torch.tensor([2, 2], dtype=torch.float64).view(shape)
        for own in (task, Regression(THREE, loss=torch.nn.MSELoss(), extra_scores={"error": torch.sub})):
            assert own.loss(outputs, labels) == 0.5, "a loss of one's own is not broadcast to (B, B) either"
        assert own.all_scores(outputs, labels)["error"].flatten().tolist() == [-1, 0]
        scores = task.scores(*task.align_shapes(outputs, labels))
        assert {name: score.flatten().tolist() for name, score in scores.items()} == {"mae": [1, 0], "mse": [1, 0]}


@pytest.mark.parametrize("label", [[0, 1, 1], (0, 1, 1), [0.0, 1.0, 1.0]])
@pytest.mark.parametrize("kind", [Classification, Multilabel, Regression])
def test_labels_that_are_lists_or_tuples_are_refused_with_what_to_return(kind, label):
    samples = [{"image": torch.zeros(2), "label": label}] * 2
    for task in (kind(THREE), kind(THREE, loss=functional.mse_loss)):
        with refused(r"the labels of a batch are a list.*torch\.tensor\(label\)"):
            task.loss(LOGITS[:2], default_collate(samples)["label"])
        with refused("give the numbers of classes" if kind is Classification else r"torch\.tensor\(label\)"):
            check_dataset(samples, task)
    arrays = [{"image": torch.zeros(2), "label": np.array(label, np.float32)}] * 2
    check_dataset(arrays, kind(THREE))


def test_shapes_that_would_be_broadcast_are_refused_for_each_task():
    classes = LABELS.new_zeros(4)
    numbers = torch.zeros(4)
    column = torch.zeros(4, 1)
    logits = torch.zeros(4, 3)
    image = torch.zeros(4, 1, 5, 5)
    for kind, outputs, labels in (
        (Classification, column, classes),
        (Classification, image, classes),
        (Multilabel, logits, column),
        (Multilabel, numbers, logits),
        (Regression, logits, numbers),
        (Regression, numbers[:1], numbers),
        (Regression, numbers[0], numbers[:1]),  # squeeze() of one sample
        (Regression, image, image[:, 0, 0]),
    ):
        task = kind(THREE, loss=torch.sub)
        for function in (task.loss, task.all_scores, task.align_shapes):
            with refused(r"(outputs|labels) are \(.*\), not \(B.* for \d samples"):
                function(outputs, labels)
    for kind, outputs, labels in (
        (Classification, logits[:, :, None, None], classes[:, None]),
        (Multilabel, logits[..., None], logits),
        (Regression, image, image[:, 0]),
        (Task, image, image[:, 0]),
        (Task, numbers, column),
    ):
        outputs, labels = kind(THREE).align_shapes(outputs, labels)
        assert outputs.shape == labels.shape or (outputs.shape, labels.shape) == ((4, 3), (4,))
    boxes = [{"boxes": column}]
    assert Task(THREE).align_shapes(image, boxes) == (image, boxes), "others are left as they are"


@pytest.mark.parametrize("kind", [Classification, Multilabel, Regression])
@pytest.mark.parametrize("wrap", [lambda logits: {"logits": logits}, lambda logits: SimpleNamespace(logits=logits)])
def test_outputs_that_are_no_tensor_are_named_where_the_loss_or_a_score_cannot_use_them(kind, wrap):
    outputs = wrap(LOGITS)
    task = kind(THREE)
    reading = kind(THREE, loss=lambda outputs, labels: getattr(outputs, "logits", LOGITS).mean())
    for function in (task.loss, task.all_scores, reading.all_scores):
        with refused(f"returned a {type(outputs).__name__}.*logits.*a task whose default_loss.*docs/extending.md"):
            function(outputs, LABELS)
    assert reading.loss(outputs, LABELS) == LOGITS.mean()


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 5.0])])
def test_the_items_of_a_loss_are_what_torch_divides_by(weight):
    labels = torch.tensor([0, 255, 2, 1, 255, 2])
    outputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    for kind in (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss):
        mean, total = (kind(weight, ignore_index=255, reduction=how) for how in ("mean", "sum"))
        items = Task(THREE, loss=mean).loss_denominator(labels)
        assert torch.allclose(mean(outputs, labels) * items, total(outputs, labels))
        assert Task(THREE, loss=total).loss_denominator(labels) is None
    assert (
        Task(THREE).loss_denominator(labels) is None is Task(THREE, loss=torch.nn.MSELoss()).loss_denominator(labels)
    )


def test_a_batch_has_as_many_samples_as_labels_or_inputs_whatever_comes_first():
    task = Task(THREE)
    assert task.batch_length({"edges": torch.zeros(2, 9), "image": LOGITS, "label": torch.zeros(4)}) == 4
    assert task.batch_length({"step": torch.zeros(()), "image": [*LOGITS]}) == 3


def test_a_batch_is_cut_into_parts_by_its_samples_also_where_a_field_is_a_list():
    left = torch.arange(4)
    right = left * 10
    batch = {"image": [left, right], "names": [*"abcd"], "label": (left, right)}
    whole = {"scale": 0.5, "split": "abcd", "step": torch.tensor(3), "pair": [left, torch.tensor(3)], "none": None}
    whole |= {"list": ["about all"], "image": left}
    assert Classification(THREE, inputs="left").batch_length({"left": left, "label": [left, right]}) == 4
    part = rows_of(Task(THREE, "names", None), batch, slice(1, 3))
    for name in ("image", "label"):
        assert [field.tolist() for field in part[name]] == [[1, 2], [10, 20]]
    assert part["names"] == ["b", "c"]
    part = rows_of(Task(THREE), whole, slice(1, 3))
    assert part.pop("image").tolist() == [1, 2]
    assert part.pop("pair")[0].tolist() == [1, 2], "a number, a text and a tensor () are of the whole batch"
    assert part == {name: whole[name] for name in part} and len(part) == 5
    with refused(r"4 samples has a field \(9,\), .* set train.accumulate=1"):
        rows_of(Task(THREE, "offsets"), {"words": torch.arange(9), "offsets": left}, slice(1, 3))


@pytest.mark.parametrize(("earlier", "name"), RENAMED.items())
def test_a_method_under_an_earlier_name_is_refused_as_nothing_would_call_it(earlier, name):
    with refused(f"{earlier} .* {name}"):
        type("Mine", (Regression,), {earlier: lambda self, labels: labels})
    type("Mine", (Regression,), {name: lambda self, labels: labels, earlier: 1})


def test_a_label_that_is_an_input_is_once_or_twice_in_a_batch_and_nothing_else_is_taken_for_it():
    task = Task(None, inputs="image", label="image")
    images = torch.rand(2, 3, 8, 8)
    for batch in (images, [images], (images, images.clone()), {"image": images}):
        assert torch.equal(task.to_dict(batch)["image"], images)
    with refused("task.label=image is one of task.inputs"):
        task.to_dict((images, torch.zeros(2)))


class Graphs:
    """A batch of graphs, of which a slice is a list."""

    def __getitem__(self, part):
        return [self][part]


def test_a_field_of_which_a_slice_is_another_kind_of_batch_is_not_divided():
    with refused("a batch has a Graphs, whose rows are a list"):
        rows_of(Task(THREE, "graphs"), {"graphs": Graphs(), "label": torch.zeros(2)}, slice(0, 1))
