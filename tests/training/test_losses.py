"""What a loss and a score may be: a mean or a sum, with weights, ignored labels and parameters of its own."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence

from tests.configs import FAST, checkpoint, composed, logged, train
from tests.data.reading import refused
from training.assemble import assemble
from training.build import function_of
from training.checks import check_dataset
from training.config import checked
from training.dry_run import is_sum
from training.no_trace import no_trace
from training.parts import parts_of, repeated
from training.tasks import Task, loss_setting
from training.trainer import Trainer, move_arguments

CLASSES = 10
IGNORED = 7
SCALE = "task.loss={_target_: tests.training.test_losses.Scaled}"


class Kept(Trainer):
    """Keeps the gradient of each step, and does not change the weights."""

    def optimizer_step(self, optimizer):
        self.gradient = [weight.grad.clone() for weight in self.model.parameters()]
        optimizer.zero_grad()


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, outputs, labels):
        return functional.cross_entropy(outputs * self.scale, labels)


class OnModelOnly(Trainer):
    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), 0.1)


class OwnStep(Trainer):
    def training_step(self, batch):
        inputs, labels = self.inputs_and_labels(batch)
        return self.task.loss(self.model(*inputs), labels)


class OfTwo:
    """A loss that takes two samples at a time."""

    def __init__(self, reduction):
        self.reduction = reduction

    def __call__(self, outputs, labels):
        if len(outputs) != 2:
            raise ValueError("only two")
        return functional.cross_entropy(outputs, labels)


def squeezed(outputs, labels):
    return ((outputs.squeeze(1) - labels) ** 2).mean()


def unsqueezed(outputs, labels):
    return ((outputs - labels.unsqueeze(1)) ** 2).sum()


def strict(outputs, labels):
    return functional.binary_cross_entropy_with_logits(outputs.squeeze(1), labels)


def subtracted(outputs, labels):
    return (outputs - labels).abs().mean()


def ranked(outputs, labels):
    """The mean loss of each pair of samples."""
    outputs, labels = outputs.flatten(), labels.flatten()
    return ((outputs[:, None] - outputs - (labels[:, None] - labels)) ** 2).mean()


def contrastive(outputs, labels):
    """The mean loss of telling each sample from the others of its batch."""
    similar = outputs @ outputs.T
    return functional.cross_entropy(similar * 0.0, torch.arange(len(outputs)))


@pytest.fixture(scope="module")
def trainer():
    with ExitStack() as cleanup:
        config = checked(composed(*FAST, f"trainer._target_={__name__}.Kept"))
        yield assemble(config, None, cleanup).trainer


FUNCTIONS = functional.cross_entropy, functional.nll_loss
LOSSES = st.one_of(
    st.builds(
        lambda kind, reduction, weight, ignored: kind(weight=weight, reduction=reduction, ignore_index=ignored),
        st.sampled_from([nn.CrossEntropyLoss, nn.NLLLoss, *(partial(partial, function) for function in FUNCTIONS)]),
        st.sampled_from(["mean", "sum", "none"]),
        st.sampled_from([None, torch.arange(1.0, CLASSES + 1)]),
        st.sampled_from([-100, IGNORED]),
    ),
    st.builds(nn.MultiMarginLoss, reduction=st.sampled_from(["mean", "sum", "none"])),
)


@settings(max_examples=60, deadline=None)
@given(loss=LOSSES, labels=st.lists(st.integers(0, CLASSES - 1), min_size=2, max_size=9), parts=st.integers(1, 9))
def test_parts_of_a_batch_give_the_gradient_of_the_whole_whatever_the_loss(trainer, loss, labels, parts):
    is_mean = loss_setting(loss, "reduction") == "mean"
    assume(not is_mean or any(label != IGNORED for label in labels))  # a mean over nothing is NaN
    images = torch.randn(len(labels), 3, 8, 8, generator=torch.Generator().manual_seed(len(labels)))
    batch = {"image": images, "label": torch.tensor(labels)}
    vars(trainer)["task"] = Task(None, loss=loss)
    trainer.train_config = replace(trainer.train_config, accumulate=parts)
    first = parts_of(trainer.task, batch, len(labels) // 2)[0]
    with no_trace(trainer):
        found = is_sum(trainer, trainer.loss_of(first), trainer.loss_of, first)
    trainer.training_loss_is_sum = found
    assert found == (loss_setting(loss, "reduction") == "sum")

    trainer.train_step(batch)
    whole = loss(trainer.model(images), batch["label"]).mean()
    expected = torch.autograd.grad(whole, list(trainer.model.parameters()))
    torch.testing.assert_close(trainer.gradient, list(expected), rtol=1e-4, atol=1e-5)
    logged = trainer.means.read()["loss"]
    assert logged == pytest.approx(whole.item() / (len(labels) if found else 1), rel=1e-4, abs=1e-6)


def test_the_test_loss_of_a_sum_does_not_depend_on_the_size_of_batches(tmp_path):
    losses = {}
    for reduction in ("mean", "sum"):
        for size in (16, 64):
            loss = f"task.loss={{_target_: torch.nn.CrossEntropyLoss, reduction: {reduction}}} optim.lr=0"
            summary = train(tmp_path / f"{reduction} {size}", *FAST, loss, f"train.batch_size={size}")
            losses[reduction, size] = summary["test_loss"]
    assert len({round(loss, 4) for loss in losses.values()}) == 1


def test_a_training_step_of_ones_own_with_a_sum_is_refused_only_if_batches_are_divided(tmp_path):
    own = f"trainer._target_={__name__}.OwnStep task.loss={{_target_: torch.nn.CrossEntropyLoss, reduction: sum}}"
    train(tmp_path / "whole", *FAST, own)
    with refused("reduction=mean"):
        train(tmp_path / "parts", *FAST, own, "train.accumulate=2")


class Followed(Kept):
    """Does something after each step of ours, as to update a teacher."""

    def train_step(self, batch):
        super().train_step(batch)
        self.log(norm=torch.stack([part.norm() for part in self.gradient]).norm())


def test_a_step_that_calls_ours_gets_the_whole_gradient_of_a_sum(tmp_path):
    norms = []
    for parts in (1, 2):
        loss = "task.loss={_target_: torch.nn.CrossEntropyLoss, reduction: sum}"
        followed = f"trainer._target_={__name__}.Followed train.accumulate={parts} train.max_steps=1"
        train(tmp_path / f"{parts}", *FAST, loss, followed)
        norms += logged(tmp_path / f"{parts}", "norm")
        assert logged(tmp_path / f"{parts}", "loss")[0] < 10, "it is logged per sample"
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


KINDS = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "mean of comparisons": contrastive,
}


@pytest.mark.parametrize("constant", [0.0, 5.0, -1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_is_told_from_a_mean_whatever_is_added_to_it_and_whatever_else_is_in_a_batch(trainer, kind, constant):
    vars(trainer)["task"] = Task(None, loss=lambda outputs, labels: KINDS[kind](outputs, labels) + constant)
    batch = {"image": torch.randn(2, 3, 8, 8), "label": torch.tensor([0, 9]), "scale": 0.5, "step": torch.tensor(3)}
    with no_trace(trainer):
        assert is_sum(trainer, trainer.loss_of(batch), trainer.loss_of, batch) == (kind == "sum")


@pytest.mark.parametrize("draw", [torch.randn_like, lambda outputs: torch.randn(CLASSES)])
def test_a_random_loss_is_only_known_to_be_a_sum_by_what_it_says(trainer, draw):
    batch = {"image": torch.randn(2, 3, 8, 8), "label": torch.tensor([0, 9])}

    def loss(outputs, labels, reduction):
        return functional.cross_entropy(outputs + draw(outputs), labels, reduction=reduction)

    for seed in range(60):
        for reduction in ("mean", "sum"):
            for says in (True, False):
                own = partial(loss, reduction=reduction)
                vars(trainer)["task"] = Task(None, loss=own if says else lambda *given, own=own: own(*given))
                with no_trace(trainer):
                    torch.manual_seed(seed)
                    found = is_sum(trainer, trainer.loss_of(batch), trainer.loss_of, batch)
                assert found is ((reduction == "sum") if says else None)


@pytest.mark.parametrize("mode", [True, False])
def test_the_dry_run_restores_weights_that_a_network_changes_in_whichever_mode_it_is(trainer, mode):
    trainer.model.train(mode)
    before = [weight.clone() for weight in trainer.model.parameters()]
    with no_trace(trainer):
        for weight in trainer.model.parameters():
            weight.add_(1)
    assert all(map(torch.equal, before, trainer.model.parameters())) and trainer.model.training is mode


def test_the_dry_run_leaves_what_a_network_does_once_to_training(trainer):
    part = trainer.model[0]
    part.is_initialized = False
    part.statistics = None
    with no_trace(trainer):
        part.is_initialized = True
        part.statistics = torch.ones(2)
        part.cache = [1]
    assert part.is_initialized is False and part.statistics is None and not hasattr(part, "cache")


class Counts:
    """A loss or a score that is no module, counts its calls, and changes a tensor in place."""

    def __init__(self):
        self._calls = 0
        self.centre = torch.zeros(10)

    def __call__(self, outputs, labels):
        self._calls += 1
        self.last = outputs
        self.centre.lerp_(outputs.detach().mean(0), 0.1)
        return functional.cross_entropy(outputs, labels, reduction="none") + self._calls


class CountsInside(nn.Module):
    """A score that is a module, and counts its calls in a buffer of a part."""

    def __init__(self):
        super().__init__()
        self.part = nn.BatchNorm1d(10)

    def forward(self, outputs, labels):
        self.part.num_batches_tracked += 1
        return outputs.sum(1)


def test_the_dry_run_leaves_no_trace_in_a_loss_a_score_and_a_trainer(trainer):
    loss, score, module = Counts(), Counts(), CountsInside()
    trainer.baseline = torch.zeros(())
    vars(trainer)["task"] = Task(None, loss=loss, extra_scores={"counted": score, "inside": module})
    batch = {"image": torch.randn(2, 3, 8, 8), "label": torch.tensor([0, 9])}
    with no_trace(trainer):
        trainer.evaluation_step(batch)
        trainer.baseline += 1
        trainer.steps_seen = 1
    assert trainer.baseline == 0 and not hasattr(trainer, "steps_seen") and module.part.num_batches_tracked == 0
    for part in (loss, score):
        assert vars(part).keys() == {"_calls", "centre"} and part._calls == 0 and not part.centre.any()


@pytest.mark.parametrize(("reduction", "expected"), [("sum", True), ("mean", False), (None, None), (print, False)])
def test_whether_a_loss_of_batches_of_one_size_is_a_sum_is_only_known_by_what_it_says(
    trainer, caplog, reduction, expected
):
    caplog.set_level("INFO")
    vars(trainer)["task"] = Task(None, loss=OfTwo(reduction))
    batch = {"image": torch.randn(2, 3, 8, 8), "label": torch.tensor([0, 9])}
    with no_trace(trainer):
        assert is_sum(trainer, trainer.loss_of(batch), trainer.loss_of, batch) is expected
    assert "only two" in caplog.text


def without_gradient(outputs, labels):
    return outputs.sum() * 0


@pytest.mark.parametrize("parts", [1, 2])
def test_that_a_sum_cannot_be_told_from_a_mean_is_said_once(tmp_path, caplog, parts):
    loss = f"task.loss={{_target_: {__name__}.without_gradient, _partial_: true}}"
    train(tmp_path, *FAST, f"{loss} train.accumulate={parts}")
    assert caplog.text.count("is not known") == 1


def of_a_list(outputs, labels, numbers: list[float] | None = None):
    return numbers


@pytest.mark.parametrize(
    ("target", "key"),
    [
        ("torch.nn.CrossEntropyLoss", "weight"),
        ("torch.nn.NLLLoss", "weight"),
        ("torch.nn.MultiLabelSoftMarginLoss", "weight"),
        ("torch.nn.BCEWithLogitsLoss", "pos_weight"),
        (f"{__name__}.of_a_list", "numbers"),
    ],
)
def test_a_list_is_a_tensor_where_a_loss_takes_nothing_else(target, key):
    loss = function_of("task.loss", {"_target_": target, key: [1, 2.5], "_partial_": True})
    if key == "numbers":
        assert loss(0, 0) == [1, 2.5]
    else:
        assert torch.equal(getattr(loss, key), torch.tensor([1, 2.5]))


def test_tensors_in_the_settings_of_a_function_are_moved_to_the_device():
    loss = function_of("task.loss", {"_target_": "torch.nn.functional.cross_entropy", "weight": [1, 2.5]})
    move_arguments(loss, torch.device("meta"))
    assert loss.keywords["weight"].is_meta


def test_parameters_of_a_loss_are_trained_and_saved(tmp_path, caplog):
    caplog.set_level("INFO")
    train(tmp_path, *FAST, SCALE)
    assert checkpoint(tmp_path)["others"]["task"]["own_loss.scale"] != 1
    assert "own_loss.scale are trained too" in caplog.text


def test_a_parameter_of_a_loss_that_no_optimizer_has_is_warned_of(tmp_path, caplog):
    train(tmp_path, *FAST, SCALE, f"trainer._target_={__name__}.OnModelOnly")
    assert "own_loss.scale" in caplog.text and "configure_optimizers" in caplog.text
    assert checkpoint(tmp_path)["others"]["task"]["own_loss.scale"] == 1


def test_a_loss_and_a_score_get_outputs_that_are_no_tensor_as_they_are():
    task = Task(
        None, loss=lambda outputs, labels: outputs["a"].sum(), extra_scores={"mine": lambda outputs, _: outputs["a"]}
    )
    outputs = {"a": torch.ones(3, dtype=torch.half)}
    assert task.loss(outputs, torch.zeros(3)) == 3 and task.all_scores(outputs, torch.zeros(3)) == {
        "mine": outputs["a"]
    }


@pytest.mark.parametrize("returned", [(torch.zeros(()), {}), {"loss": torch.zeros(())}, 0.5, None])
def test_a_loss_that_is_no_tensor_is_refused_with_its_type(returned):
    own = type("Own", (Task,), {"default_loss": lambda self, outputs, labels: returned})(None)
    for task, name in ((Task(None, loss=lambda *_: returned), "task.loss"), (own, "Own.default_loss")):
        with refused(f"{name} returned a {type(returned).__name__}"):
            task.loss(torch.zeros(3, CLASSES), torch.zeros(3))


class Constant(Task):
    def default_loss(self, outputs, labels):
        return torch.tensor(0.0)


class ConstantStep(Trainer):
    def training_step(self, batch):
        return torch.tensor(0.0)


def test_a_loss_without_a_gradient_is_refused_by_the_name_of_what_returned_it(tmp_path, trainer):
    batch = {"image": torch.zeros(2, 3, 8, 8), "label": torch.zeros(2)}
    for task, name in (
        (Task(None, loss=lambda *_: torch.tensor(0.0)), "task.loss"),
        (Constant(None), "Constant.default_loss"),
    ):
        vars(trainer)["task"] = task
        with refused(rf"^{name} returned 0 without a gradient.*return outputs\[:0\]\.sum\(\)"):
            trainer.loss_of(batch)
    with refused(r"ConstantStep.training_step returned \(\): .*outputs\[:0\]\.sum\(\)"):
        train(tmp_path, *FAST, f"trainer._target_={__name__}.ConstantStep")
    vars(trainer)["task"] = Task(None, loss=lambda outputs, labels: outputs[:0].sum())
    assert trainer.loss_of(batch) == 0


@pytest.mark.parametrize("shape", [(), (1,), (10,)])
def test_a_score_that_is_not_one_of_each_sample_is_refused(shape):
    task = Task(None, extra_scores={"mine": lambda outputs, labels: torch.ones(shape)})
    own = type("Own", (Task,), {"scores": lambda self, outputs, labels: {"mine": torch.ones(shape)}})(None)
    for scored in (task, own):
        with refused("mine .*task.metrics"):
            scored.all_scores(torch.zeros(3, CLASSES), torch.zeros(3))


def stacks(samples):
    return [torch.stack([field] * len(samples)) for field in (torch.ones(5), torch.zeros(3, 2))]


def boxes(samples):
    return [{"boxes": sample["image"]} for sample in samples]


# What data.collate may make of samples: a list that has samples, or fields.
COLLATED = {
    "images of many sizes": lambda samples: {"image": [sample["image"] for sample in samples]},
    "boxes": lambda samples: {"label": boxes(samples)},
    "boxes beside a stack": lambda samples: {"image": torch.ones(len(samples), 2), "label": boxes(samples)},
    "boxes beside a pair": lambda samples: {"image": stacks(samples), "label": boxes(samples)},
    "a pair": lambda samples: {"image": stacks(samples)},
    "three fields": lambda samples: {"image": (*stacks(samples), torch.zeros(len(samples)))},
    "pairs as inputs and labels": lambda samples: {"image": stacks(samples), "label": stacks(samples)},
    "a dict of fields": lambda samples: {"image": dict(zip("ab", stacks(samples), strict=True))},
    "a stack beside a pair": lambda samples: {"image": stacks(samples), "label": torch.zeros(len(samples))},
    "samples that it changes": lambda samples: {"image": [sample.pop("image") for sample in samples]},
}


@pytest.mark.parametrize("collate", COLLATED.values(), ids=COLLATED)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.integers(0, 4), min_size=1, max_size=6), size=st.integers(1, 6), number=st.integers(1, 6))
def test_a_batch_has_the_length_and_the_parts_of_its_samples_whatever_its_lists_hold(collate, rows, size, number):
    """rows: those of each sample's tensor."""

    def samples(part):
        return [{"image": torch.full((count, 2), float(count))} for count in rows[part]]

    def named(samples):
        return {"name": [str(len(sample["image"])) for sample in samples], **collate(samples)}

    fields = collate(samples(slice(None)))
    task = Task(None, [name for name in fields if name == "image"], "label" if "label" in fields else None)
    check_dataset(samples(slice(None)), task, named)
    batch = named(samples(slice(size)))
    count = min(size, len(rows))
    assert task.batch_length(batch) == count
    parts = parts_of(task, batch, number)
    ends = [count * part // len(parts) for part in range(len(parts) + 1)]
    for part, start, end in zip(parts, ends[:-1], ends[1:], strict=True):
        expected = named(samples(slice(start, end)))
        assert part.pop("name") == expected.pop("name")
        torch.testing.assert_close(part, expected, rtol=0, atol=0)
    assert task.batch_length(repeated(task, batch, 3)) == 3 * count


def test_packed_sequences_count_as_their_samples_and_are_never_divided(error):
    batch = {"image": pack_sequence([torch.ones(length, 4) for length in (5, 2, 1)])}
    task = Task(None, label=None)
    assert task.batch_length(batch) == 3
    for change in (parts_of, repeated):
        with error("PackedSequence", "in the network"):
            change(task, batch, 2)


def test_a_batch_of_texts_has_their_number():
    task = Task(None, label=None)
    check_dataset(["one", "another"], task, lambda samples: {"image": samples})
    assert task.batch_length({"image": [*"abc"]}) == 3


class Rows:
    """Four numbers, and the number to predict, ()."""

    def __init__(self, train, **_):
        self.rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(int(train)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"row": self.rows[index], "y": self.rows[index].sum().sigmoid()}


class OfOneClassFirst(Rows):
    def __getitem__(self, index):
        return {"row": self.rows[index], "y": torch.tensor(float(index >= 16))}


class OfOneClass(Rows):
    classes = ("a", "b", "c")

    def __getitem__(self, index):
        return {"row": self.rows[index], "y": torch.tensor([2])}


class Row(nn.Linear):
    def __init__(self, num_classes=1, **_):
        super().__init__(4, num_classes)


labels_seen = set()


def seen(outputs, labels):
    labels_seen.update(labels.flatten().tolist())
    return functional.cross_entropy(outputs, labels.flatten())


def trained_on_rows(folder, loss, task, rows="Rows"):
    settings = f"task={task} task.inputs=row task.label=y model._target_={__name__}.Row"
    data = f"data._target_={__name__}.{rows}"
    return train(folder, settings, data, f"task.loss={{_target_: {__name__}.{loss}}}", "task.metric=loss")


@pytest.mark.parametrize("task", ["regression", "own"])
@pytest.mark.parametrize("loss", ["squeezed", "unsqueezed", "strict"])
@pytest.mark.parametrize("rows", ["Rows", "OfOneClassFirst"])
def test_a_loss_that_aligns_labels_a_second_time_is_refused(tmp_path, loss, task, rows):
    with refused(r"gets labels \(\d, 1\), as outputs are, not \(\d,\).*leave out its squeeze or unsqueeze"):
        trained_on_rows(tmp_path, loss, task, rows)


@pytest.mark.parametrize("loss", ["subtracted", "ranked"])
@pytest.mark.parametrize("rows", ["Rows", "OfOneClassFirst"])
def test_a_loss_of_aligned_labels_or_of_pairs_is_not_refused(tmp_path, loss, rows):
    trained_on_rows(tmp_path, loss, "regression", rows)


def test_the_first_steps_are_tried_with_no_label_that_is_no_class(tmp_path):
    """On a GPU a loss of one ends the process."""
    labels_seen.clear()
    trained_on_rows(tmp_path, "seen", "classification", "OfOneClass")
    assert labels_seen == {2}
