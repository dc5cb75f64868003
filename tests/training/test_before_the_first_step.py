"""Before the first step a run passes two samples through all of its parts: what does not fit ends in a sentence.

The sentence has the value and the remedy. What fits passes, and the checks leave no trace.
"""

import os
import random
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from data.errors import DataError
from data.subset import Subset
from loaders import seed_globals
from tests.configs import EXTENSIONS, FAST, IMAGES, checkpoint, composed, metrics, steps, train
from tests.training.extensions import Faulty, Images, Linear, Lying, Stream, Worst, lying
from training.checks import check_dataset, check_processes, check_sampler, check_settings, first_indices
from training.config import ConfigError, checked
from training.preprocessing import check_layout, check_layouts
from training.tasks import Classification
from training.trainer import Trainer


class Normed(nn.Sequential):
    def __init__(self, in_channels, track_running_stats=True, **_):
        norm = nn.BatchNorm1d(4, track_running_stats=track_running_stats)
        super().__init__(nn.Flatten(), nn.Linear(64 * in_channels, 4), norm, nn.Linear(4, 2))


def forgets_return(**_):
    nn.Linear(3, 2)


def mistakes(outputs, labels):
    return (outputs.argmax(dim=1) != labels).float()


def compared_with_all(outputs, labels):
    return (outputs.argmax(1, keepdim=True) == labels).float()


def entropy_of_shares(outputs, labels):
    return -(labels * outputs.log_softmax(dim=1)).sum(1).mean()


def of_each_class(outputs, labels):
    return (outputs.softmax(1) - nn.functional.one_hot(labels, 2)).square()


class Unscored(Trainer):
    def evaluation_step(self, batch):
        return super().evaluation_step(batch)["loss"]


class PerSample(Trainer):
    """Forgets the mean."""

    def training_step(self, batch):
        return super().training_step(batch)[0].expand(len(batch["label"]))


class WithSchedules(Trainer):
    """Returns schedules too, as trainers of Lightning do."""

    def configure_optimizers(self):
        return [super().configure_optimizers()], ["schedule"]


class Auxiliary(Linear):
    """Returns several outputs in training mode only."""

    def forward(self, images):
        outputs = super().forward(images)
        return (outputs, outputs) if self.training else outputs


class LateWeight(Linear):
    """Makes a layer in its first forward pass, when it knows the size of its input."""

    def add(self, **_):
        self.late = None

    def forward(self, images):
        if self.late is None:
            self.late = nn.Linear(images.shape[-1], images.shape[-1])
        return super().forward(self.late(images))


class Registers(Linear):
    """Registers buffers in its forward pass: one that is saved, and another that is not."""

    def add(self, name=None, **_):
        self.name = name

    def forward(self, images):
        if not hasattr(self, "cached"):
            self.register_buffer("cached", torch.ones(()), persistent=False)
        if self.name and not hasattr(self, self.name):
            self.register_buffer(self.name, images.mean())
        return super().forward(images)


class NeedsClosure(Trainer):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.model.parameters())


class Forgetful(Trainer):
    def training_step(self, batch):
        super().training_step(batch)


class Uncomputable(Worst):
    def compute(self):
        raise TypeError("not of such labels")


class Indexed(Worst):
    def update(self, outputs, labels, indexes):
        super().update(outputs, labels)


class Foreign(Worst):
    """Uses common names for something else."""

    to = "cpu"

    def higher_is_better(self, other):
        return False

    def compute(self):
        return {"array": np.array(0.5), "flag": np.bool_(True), "text": np.str_("1"), "list": [1.0]}


class ByLoss:
    total_steps = None

    def __init__(self, optimizer):
        pass

    def step(self, loss):
        pass


class Unsaved:
    def on_step(self, run):
        pass

    def state_dict(self, destination):
        pass


class NeedsMore(Worst):
    """Cannot be computed on two samples."""

    def compute(self):
        if self.all.sum() < 3:
            raise ValueError("too few")
        return {"x": 0.5}


def own(key, name):
    return f"{key}._target_={__name__}.{name}"


def fault(name):
    return f"data._target_={EXTENSIONS}.Faulty +data.fault='{name}'"


def score(name):
    return f"task.scores={{{name}: {{_target_: {__name__}.mistakes}}}}"


def metric(name, chosen, module=__name__):
    return f"task.metrics={{m: {{_target_: {module}.{name}}}}} task.metric={chosen}"


def changing(outputs, labels, of, larger_than=0):
    """A loss, or the scores, which changes what it gets, in batches of more samples than that."""
    loss = nn.functional.cross_entropy(outputs, labels, reduction="none")
    if len(labels) > larger_than:
        {"outputs": outputs, "labels": labels}[of].mul_(1)
    return loss


def of_heads(outputs, labels):
    outputs["logits"] = outputs["logits"] - 1
    return nn.functional.cross_entropy(outputs["logits"], labels)


class InPlace(Worst):
    def update(self, outputs, labels):
        super().update(outputs, labels.clamp_(max=1))


class Heads(nn.Sequential):
    def __init__(self, in_channels, **_):
        super().__init__(nn.Flatten(), nn.Linear(64 * in_channels, 2))

    def forward(self, images):
        return {"logits": super().forward(images)}


class Rows(Sequence):
    """Makes its items when they are read."""

    def __init__(self, logits):
        self.logits = logits

    def __len__(self):
        return len(self.logits)

    def __getitem__(self, index):
        return self.logits[range(len(self))[index]]


class OfRowsOfLogits(Heads):
    def forward(self, images):
        return Rows(super().forward(images)["logits"])


def of_rows(outputs, labels):
    return nn.functional.cross_entropy(torch.stack([*outputs]), labels)


class Margin(Classification):
    """Has a loss of its own, which takes the numbers of classes."""

    def default_loss(self, outputs, labels):
        return nn.functional.multi_margin_loss(outputs, labels)


class Relabels(Classification):
    def for_metrics(self, outputs, labels):
        labels[labels > 1] = 0
        return outputs, labels


def function(name, options=""):
    return f"{{_target_: {__name__}.{name}, _partial_: true{options}}}"


NORM = own("model", "Normed")
STATELESS = f"{NORM} +model.track_running_stats=false"
ONE_SAMPLE = r"train\.last_batch=drop & train\.accumulate"
ONE_TESTED = r"cannot evaluate 1 sample & train\.batch_size"
LOSSLESS = f"{score('lossless')} task.metric=lossless"


def largest(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels, reduction="none").topk(8).values.mean()


class Unlabelled(Images):
    """Offers its labels, of which one is that of no class."""

    def __init__(self, train, label, at=1, **options):
        super().__init__(train, **options)
        self.labels = [index % 2 for index in range(len(self))]
        self.labels[at] = label

    def __getitem__(self, index):
        return super().__getitem__(index)[0], self.labels[index]


def lbfgs(params, **_):
    return torch.optim.LBFGS(params)


def muon(params, **_):
    return torch.optim.Muon(params)


def lazy(num_classes, **_):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


class OfShape(torch.utils.data.TensorDataset):
    classes = ("a", "b")

    def __init__(self, train, shape, dtype, **_):
        super().__init__(torch.zeros(16, *shape).to(getattr(torch, dtype)), torch.arange(16) % 2)


class OfRows(nn.Sequential):
    def __init__(self, num_classes, **_):
        super().__init__(nn.Flatten(), nn.Linear(400, num_classes))

    def forward(self, rows):
        assert rows.dtype == torch.uint8
        return super().forward(rows.float())


class OfVolumes(nn.Sequential):
    def __init__(self, num_classes, **_):
        super().__init__(nn.Conv3d(1, 2, 3), nn.Flatten(2), nn.Unflatten(2, (2, 4)), nn.Conv2d(2, num_classes, (2, 4)))

    def forward(self, volumes):
        assert self[3].weight.is_contiguous(memory_format=torch.channels_last)
        return super().forward(volumes).flatten(1)


STREAM = f"data._target_={EXTENSIONS}.Stream"
SYNTHETIC = "data._target_=data.synthetic.Synthetic"
PAIRS = f"sampler._target_={EXTENSIONS}.Pairs"
MARGIN = "task.loss={_target_: torch.nn.MultiMarginLoss}"
WEIGHTED = "task.loss={_target_: torch.nn.CrossEntropyLoss"
IGNORING = "task.loss={_target_: torch.nn.CrossEntropyLoss, ignore_index: 255}"
OF_SHAPE = own("data", "OfShape")
ENDS = "+schedule.total_steps=5 train.epochs=6"
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
NOT_FITTING = {  # the settings, and what the sentence has, in any order
    "a label for each pixel": (fault("a mask"), r"a label is int64 \(8, 8\)"),
    "an integer for each class": (fault("integers"), r"a label is int64 \(2,\) & task=multilabel"),
    "several numbers to predict": (f"{fault('shares')} task=regression", r"\(2, 2\), not \(B, 1\) & task\.numbers"),
    "a label out of range": (fault("a wrong label"), r"label & \b2\b & 0 (to|and) 1"),
    "a dict of labels": (fault("a dict"), r"Faulty has the labels \{'class': .*, integers from 0 to 1"),
    "a sample without label": (fault("no label"), "Faulty & None"),
    "a tuple with a field more": (fault("three fields"), r"\b3\b & task\.inputs|image"),
    "no classes": (fault("no classes"), "Faulty & classes & 1E1 & task=regression"),
    "a wrong label among those that are offered": (
        f"{own('data', 'Unlabelled')} +data.label=-1 +data.at=30 {IGNORING}",
        r"labels\[30\] of Unlabelled is -1: .* 0 to 1",
    ),
    "a part of a stream to validate on": (
        f"{STREAM} train.steps_per_epoch=2 data.val_fraction=0.1",
        r"data.val_fraction=0\.1: Stream is a stream",
    ),
    "a grey image without a channel": (fault("no channel"), r"'image' is uint8 \(8, 8\): .* channels last"),
    "a row as an image": (f"{OF_SHAPE} +data.shape=[5] +data.dtype=float32", r"float32 \(5,\) & uint8 .H, W, C."),
    "an image of int16": (
        f"{OF_SHAPE} +data.shape=[8,8,1] +data.dtype=int16",
        r"int16 \(8, 8, 1\) & uint8 .H, W, C.",
    ),
    "a Pillow image": (fault("a picture"), "PIL.*__getitem__"),
    "an image that is mirrored in place": (fault("negative strides"), "two samples cannot make a batch & negative"),
    "a field of some samples": (fault("a field of some"), "two samples & KeyError: 'age' & the same fields"),
    "doubles for lazy weights": (
        f"{own('model', 'lazy')} {fault('doubles')}",
        "Sequential cannot use the first training samples & dtype",
    ),
    "doubles": (fault("doubles"), r"float64 & \.astype\(np\.float32\)"),
    "no labels to count": ("task.class_weights=balanced", "task.class_weights=balanced: Images has no `labels`"),
    "no samples": (fault("empty"), "Faulty & sample"),
    "no __getitem__": ("data._target_=argparse.Namespace +data.classes=[a]", "Namespace & __getitem__"),
    "a stream without an end": (STREAM, r"train\.steps_per_epoch & Stream"),
    "the steps of an epoch of what has a length": (
        f"train.steps_per_epoch=2 {SYNTHETIC}",
        r"train\.steps_per_epoch=2 & Synthetic & sampler",
    ),
    "a field that is not there": (f"task.inputs=picture {SYNTHETIC}", "picture & image"),
    "a score whose direction is that of a metric": (
        f"task.metrics={{error: {{_target_: {EXTENSIONS}.Worst}}}} task.metric=error_x "
        f"task.scores={{error_x: {{_target_: {__name__}.mistakes}}}}",
        r"task\.metric=error_x & task\.higher_is_better",
    ),
    "a score without a direction": (LOSSLESS, r"task.metric=lossless & task\.higher_is_better=true or false"),
    "a metric that is not there": (
        metric("Several", "m_wurst", EXTENSIONS),
        r"task\.metric=m_wurst & m_worst & accuracy",
    ),
    "a score that is called loss": (score("loss"), "'loss' & choose another name"),
    "a score of the name of another one": (score("accuracy"), "'accuracy' & choose another name"),
    "a score of each sample and the labels of all": (
        f"task.scores={{right: {function('compared_with_all')}}}",
        r"the score right has the shape \(4, 4\), and \(8, 8\) & \(B,\)",
    ),
    "a metric of the name of a score": (
        f"task.metrics={{accuracy: {{_target_: {EXTENSIONS}.Worst}}}}",
        "'accuracy' & choose another name",
    ),
    "a metric of a name that another one returns": (
        f"task.metrics={{m: {{_target_: {EXTENSIONS}.Several}}, m_map: {{_target_: {EXTENSIONS}.Worst}}}}",
        "'m_map' & choose another name",
    ),
    "a mean of one number for three channels": ("data.mean=[0.5]", r"^data\.mean=\[0\.5\]: & a number per channel"),
    "a mean that is a word": ("data.mean=imagenet", r"^data\.mean=imagenet: & auto or a number per channel"),
    "a std without channels": ("data.std=0.5", r"^data\.std=0\.5:"),
    "a mean of floats": (f"{fault('floats')} data.mean=auto", "^data.mean=auto:"),
    "an optimizer of no groups": (own("optim", "lbfgs"), "lbfgs & configure_optimizers"),
    "a network that is a path": ("model._target_=./net.py", r"_target_=\./net\.py: give MODULE\.NAME"),
    "an optimizer of torch of no groups": (
        "optim._target_=torch.optim.LBFGS optim.momentum=null optim.weight_decay=null optim.nesterov=null",
        "LBFGS & parameter groups & closure & configure_optimizers & train_step",
    ),
    "an optimizer that needs a closure": (own("trainer", "NeedsClosure"), "LBFGS.step & closure & train_step"),
    "an optimizer of matrices alone": (own("optim", "muon"), "muon & configure_optimizers"),
    "other images to test": (fault("other test images"), "6, 8 & test"),
    "grey images to test": (fault("grey test images"), r"uint8 \(8, 8, 3\), and test samples as .*\(8, 8, 1\)"),
    "a module as a network": ("model._target_=data.subset", "give a function or a class"),
    "another number of outputs": ("+model.num_classes=1000", r"1000 & \b2\b"),
    "a network that is none": (own("model", "forgets_return"), "model & None & return"),
    "a norm that gets one sample": (f"{NORM} train.batch_size=4 train.accumulate=3", ONE_SAMPLE),
    "a norm with a last batch of one": (f"{NORM} data.length=65 train.last_batch=keep", ONE_SAMPLE),
    "a norm with a last test batch of one": (f"{STATELESS} data.test_length=33", ONE_TESTED),
    "a norm with a last validation batch of one": (
        f"{STATELESS} data.length=68 data.val_fraction=0.25 train.batch_size=12",
        ONE_TESTED,
    ),
    "a loss of the largest, and a smaller last test batch": (
        f"task.loss={function('largest')} data.test_length=36",
        "cannot evaluate 4 sample",
    ),
    "a loss that changes its labels": (
        f"task.loss={function('changing', ', of: labels')}",
        r"the loss changes the labels .* labels\.clone",
    ),
    "a loss that changes its outputs": (
        f"task.loss={function('changing', ', of: outputs')}",
        r"the loss changes the outputs .* outputs\.clone",
    ),
    "a loss that does so in a larger batch": (
        f"task.loss={function('changing', ', of: outputs, larger_than: 8')}",
        "the loss changes the outputs",
    ),
    "a loss that does so in a dict": (
        f"{own('model', 'Heads')} task=own task.label=label task.loss={function('of_heads')}",
        "the loss changes the outputs",
    ),
    "a score that changes its labels": (
        f"task.scores={{mine: {function('changing', ', of: labels')}}}",
        r"task\.scores\.mine changes the labels",
    ),
    "a metric that changes its labels": (metric("InPlace", "loss"), r"task\.metrics\.m changes the labels"),
    "a task that changes labels for metrics": (own("task", "Relabels"), "for_metrics of the task changes the labels"),
    "a frozen part that is not there": ("train.freeze=features", r"train\.freeze=features & \b1\b"),
    "a loss without gradient": (f"task.loss={{_target_: {__name__}.mistakes}}", "gradient"),
    "a loss of shares that gets the numbers of as many samples as classes": (
        f"task.loss={{_target_: {__name__}.entropy_of_shares, _partial_: true}}",
        r"Classification and its loss .* cannot use the first training samples & size of tensor",
    ),
    "a loss that takes no shares of mixup": (f"augment.mixup=0.2 {MARGIN}", "loss|augment|mixup|target"),
    "a task whose loss takes no shares of mixup": (
        f"augment.mixup=0.2 {own('task', 'Margin')}",
        r"labels are shares of classes \(B, classes\) by augment\.mixup",
    ),
    "weights of three classes": (f"{WEIGHTED}, weight: [1, 2, 3]}}", "weight"),
    "weights that are no numbers": (
        f"{WEIGHTED}, weight: [a, b]}}",
        r"task\.loss\.weight=\['a', 'b'\] & give numbers",
    ),
    "a loss per sample": (own("trainer", "PerSample"), r"\(2,\)|\(16,\) & mean"),
    "schedules beside optimizers": (
        own("trainer", "WithSchedules"),
        "WithSchedules & tuple with list, list & conf/schedule",
    ),
    "two outputs in training mode only": (own("model", "Auxiliary"), "Auxiliary & training mode & not tuple"),
    "a buffer that a forward pass registers": (
        f"{own('model', 'Registers')} +model.name=shift",
        r'Registers registers the buffer shift in its forward pass & self\.register_buffer\("shift", None\)',
    ),
    "a weight that a forward pass makes": (own("model", "LateWeight"), r"model\.late\.weight & constructor & Lazy"),
    "a step that returns nothing": (own("trainer", "Forgetful"), "Forgetful|training_step & None|return"),
    "scores without names": (own("trainer", "Unscored"), "evaluation_step & dict|name"),
    "a metric that needs indexes": (
        metric("Indexed", "loss"),
        r"task\.metrics\.m: Indexed\.update is called with \(outputs, labels\) & indexes",
    ),
    "a schedule that is stepped by the loss": (own("schedule", "ByLoss"), r"schedule: ByLoss\.step .*'loss'"),
    "a state that needs an argument": (own("+callbacks.mine", "Unsaved"), r"callbacks\.mine: Unsaved\.state_dict"),
    "a sampler of a stream": (
        f"{STREAM} train.steps_per_epoch=2 {lying(64, 64)}",
        "^sampler: Stream is a stream",
    ),
    "no sample that can be read": (
        fault("all unreadable") + " loader.on_error=skip loader=workers",
        r"0\.png is missing",
    ),
    "a metric whose direction is a method": (
        metric("Foreign", "m_array"),
        r"task\.metric=m_array: .* task\.higher_is_better=true or false",
    ),
    "a metric that cannot be computed": (metric("Uncomputable", "loss"), r"task\.metrics & not of such labels"),
    "a function without a target": ("data.collate=data.collate.pad", r"data\.collate & _target_"),
    "a callback without methods": ("+callbacks.mine._target_=torch.nn.ReLU", r"callbacks\.mine & on_step"),
    "a schedule that looks at a score": (f"schedule._target_={PLATEAU}", "ReduceLROnPlateau & callback|trainer"),
    "a schedule of fewer steps": (f"{ENDS} schedule=one_cycle schedule.every=step", "total_steps=5: .* 24 steps"),
    "a cosine of fewer epochs": (f"{ENDS} schedule=cosine schedule.every=epoch", "total_steps=5: .* 6 epochs"),
    "two samplers": (f"{PAIRS} batch_{PAIRS}", "batch_sampler & (?<!batch_)sampler"),
    "a sampler without a length": (lying(0, 1, "Endless"), "__len__"),
    "a sampler of length 0": (lying(0, 0), r"train\.batch_size=\d+: an epoch's 0 samples"),
    "a batch sampler of length 0": (
        lying(0, 0).replace("sampler.", "batch_sampler."),
        "^batch_sampler: Lying has the length 0",
    ),
    "a sampler without samples": (lying(0, 64), "no batch"),
    "half a step between checkpoints": ("train.checkpoint_every=0.5", r"train\.checkpoint_every=0\.5 & 10min"),
    "a checkpoint interval of no time": ("train.checkpoint_every=0min", r"train\.checkpoint_every=0min & 10min"),
    "an unknown precision": ("train.precision=fp8", "fp8 & bf16"),
    "an unknown mode of torch.compile": ("train.compile=fast", "train.compile=fast & true & reduce-overhead"),
}


SIDES = st.integers(1, 40)


@given(sides=st.tuples(SIDES, SIDES), channels=SIDES, is_uint8=st.booleans(), states=st.booleans())
def test_an_image_is_taken_only_if_its_shape_or_its_dataset_tells_where_its_channels_are(
    sides, channels, is_uint8, states
):
    height, width = sides
    dtype = torch.uint8 if is_uint8 else torch.float32
    last, first = (height, width, channels), (channels, height, width)
    right, wrong = (last, first) if is_uint8 else (first, last)
    stated = {channels, None} if states else {None}
    if states or channels < min(sides):
        check_layout("image", dtype, right, stated)
    if channels < min(sides):
        with pytest.raises(DataError, match=re.escape(f"{wrong}: ") + ".* channels"):
            check_layout("image", dtype, wrong, stated)
    either = (channels, height, channels)  # its first and its last side may be the channels just as well
    if states:
        check_layout("image", dtype, either, stated)
    else:
        with pytest.raises(DataError, match=re.escape(f"{either}: ") + ".* channels"):
            check_layout("image", dtype, either, stated)


def test_floats_are_taken_only_if_nothing_suggests_that_their_channels_are_last():
    for shape in ((1, 28, 28), (3, 4, 4), (4, 100, 80), (103, 9, 9), (13, 480, 640)):
        check_layout("image", torch.float32, shape, {None})
    for shape in ((9, 9, 103), (8, 8, 13), (8, 3, 3), (28, 28, 1), (64, 64, 64)):
        with pytest.raises(DataError, match=re.escape(f"{shape}: ") + r".*\+model.in_channels="):
            check_layout("image", torch.float32, shape, {None})


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "no input is an image: "),
        ({"text": ["a"], "age": torch.zeros(2)}, "no input is an image, 'text' is a list, 'age' is float32 .*: "),
    ],
)
def test_a_network_that_needs_channels_is_told_what_the_inputs_are(inputs, said):
    with pytest.raises(ConfigError, match=f"needs in_channels, and {said}return"):
        check_layouts(inputs, {"_target_": f"{EXTENSIONS}.linear"}, [], has_images=False)


@pytest.mark.parametrize("case", NOT_FITTING)
def test_what_does_not_fit_ends_in_a_sentence_with_the_value_and_the_remedy(tmp_path, error, case):
    overrides, patterns = NOT_FITTING[case]
    with error(*patterns.split(" & ")):
        train(tmp_path, IMAGES, overrides)
    assert not (tmp_path / "metrics.jsonl").exists() and not list(tmp_path.glob("checkpoints/*"))


def test_a_metric_that_needs_more_samples_is_named_by_the_first_evaluation(tmp_path, error):
    for chosen in ("accuracies", "m_y"):
        with error(f"task.metric={chosen}: it is one of .*accuracy"):
            train(tmp_path / chosen, metric("NeedsMore", chosen), "task.higher_is_better=true")
    assert not (tmp_path / "accuracies" / "metrics.jsonl").exists()


def test_an_epoch_that_goes_on_past_its_length_ends_the_run(tmp_path, error):
    with error("epoch 1 goes on after twice as many steps as the loader's length says, 2: .*__len__"):
        train(tmp_path, IMAGES, lying(640, 64), "train.epochs=2 train.batch_size=32")
    assert len(steps(tmp_path)) <= 5


class SharpnessAware(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "it requires closure"


def test_an_optimizer_that_refuses_to_step_is_named_with_its_words(tmp_path, error):
    with error(r"SharpnessAware\.step\(\) failed \(it requires closure", "train_step of your own"):
        train(tmp_path, own("optim", "SharpnessAware"))


class Growing(Lying):
    """Gives more samples in each epoch."""

    def set_epoch(self, epoch):
        self.gives = 64 + 32 * epoch


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_later_epoch_of_another_length_is_said_once(tmp_path, caplog, epochs):
    sampler = lying(64, 64).replace(f"{EXTENSIONS}.Lying", f"{__name__}.Growing")
    train(tmp_path, IMAGES, sampler, f"train.epochs={epochs}")
    assert caplog.text.count("epoch 2 had 6 steps, by its loader's length 4") == 1
    assert caplog.text.count("by its loader's length") == 1


class ReturnsDict(Trainer):
    def training_step(self, batch):
        return {"loss": super().training_step(batch)[0], "images": batch["image"]}


def test_a_step_that_returns_a_dict_is_told_so_without_its_numbers(tmp_path, error):
    with error("training_step returned dict: return the mean loss"):
        train(tmp_path, IMAGES, own("trainer", "ReturnsDict"))


class ScoresByName(Trainer):
    def evaluation_step(self, batch):
        return super().evaluation_step(batch) | {"iou": {"cat": 0.5}}


def test_a_score_of_evaluation_step_that_is_no_number_is_named(tmp_path, error):
    with error("iou is .*cat.*: scores and logged values must be numbers"):
        train(tmp_path, IMAGES, own("trainer", "ScoresByName"))


def test_a_collate_function_that_returns_none_is_named(tmp_path, error):
    with error("a batch is None: data.collate"):
        train(tmp_path, IMAGES, f"data.collate={{_target_: {__name__}.forgetful}}")


def forgetful(samples):
    """A collate function that leaves out all samples."""


def test_a_later_epoch_without_a_batch_ends_the_run(tmp_path, error):
    with error("gave no batch in an epoch"):
        train(tmp_path, IMAGES, lying(64, 64, "OnlyOnce"), "train.epochs=2")


def test_a_wrong_label_of_a_later_batch_is_named_with_its_batch(tmp_path, error):
    with error(r"step \d, in epoch 1: .*\b6\b"):
        train(tmp_path, IMAGES, fault("a wrong label later"))


class WrongInTheEnd(Images):
    """Its last label is that of no class, in the test set alone."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, label + 5 * (not self.train and index == len(self) - 1)


def test_a_wrong_label_of_the_test_set_alone_is_named_with_its_batch(tmp_path, error):
    with error(r"batch \d of the evaluation: .*\b6\b.* ignore_index"):
        train(tmp_path, IMAGES, f"{own('data', 'WrongInTheEnd')} train.epochs=1")


def test_a_fork_may_check_its_dataset_in_a_test(error):
    batch = check_dataset(Images(train=True), Classification(Images(train=True)))
    assert batch["image"].shape == (2, 8, 8, 3) and batch["label"].tolist() == [0, 1]
    with error("label", r"\b2\b"):
        check_dataset(Faulty(True, "a wrong label"), Classification(Images(train=True)))


ONE = f"{STREAM} data.length=1 train.steps_per_epoch=2 train.batch_size=1 loader.streams=1 loader=workers"
FITTING = {
    "parts of which one has one sample": "train.batch_size=4 train.accumulate=3",
    "one sample": "data.length=1 data.test_length=1 train.batch_size=1",
    "a last batch of one sample": "data.length=17 train.last_batch=keep",
    "a norm whose last batch is a whole one": f"{NORM} train.last_batch=keep",
    "a norm whose last test batch of one is not evaluated": f"{STATELESS} data.test_length=33 train.eval_steps=2",
    "a batch of debug=fast, which is larger than the set": "debug=fast train.batch_size=1000",
    "a stream of one sample": ONE,
    "first samples that cannot be read": fault("unreadable") + " loader.on_error=skip loader=workers",
    "float images": fault("floats"),
    "outputs that are made when they are read": (
        f"{own('model', 'OfRowsOfLogits')} task=own task.label=label task.loss={function('of_rows')}"
    ),
    "a score of each class": f"task.scores={{brier: {function('of_each_class')}}}",
    "a metric with names of something else": metric("Foreign", "m_array") + " task.higher_is_better=true",
    "mixup of labels that are shares": fault("shares") + " augment.mixup=0.2",
    "a label that the loss ignores": f"{own('data', 'Unlabelled')} +data.label=255 {IGNORING}",
    "rows of uint8, to a network that needs no channels": (
        f"{OF_SHAPE} +data.shape=[100,4] +data.dtype=uint8 {own('model', 'OfRows')}"
    ),
    "volumes, though images have their channels last": (
        f"{OF_SHAPE} +data.shape=[1,4,4,4] +data.dtype=float32 {own('model', 'OfVolumes')} train.channels_last=true"
    ),
}


@pytest.mark.parametrize("case", FITTING)
def test_what_fits_trains(tmp_path, case):
    summary = train(tmp_path, IMAGES, "train.epochs=1", FITTING[case])
    assert np.isfinite(summary["test_loss"]) and steps(tmp_path)[0]["loss"] > 0


def test_a_buffer_that_no_checkpoint_has_may_be_registered_in_a_forward_pass(tmp_path):
    assert train(tmp_path, own("model", "Registers"), "train.epochs=1")["epochs"] == 1


class Noisy(nn.Module):
    """Counts in buffers, and draws random numbers, in each forward pass, unless `quiet`."""

    def __init__(self, num_classes, in_channels, quiet=False, **_):
        super().__init__()
        self.quiet = quiet
        self.norm = nn.BatchNorm2d(in_channels)
        self.layer = nn.Linear(64 * in_channels, num_classes)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("size", torch.zeros(()))
        self.register_buffer("range", torch.zeros(()))
        self.register_buffer("scale", None)

    def _load_from_state_dict(self, state, prefix, *options):
        self.range.resize_(state[f"{prefix}range"].shape)  # as the observers of torch.ao do
        super()._load_from_state_dict(state, prefix, *options)

    def forward(self, images):
        self.calls += 1
        self.size = self.size + len(images)
        self.range.resize_(2).fill_(1)
        if self.scale is None:
            self.scale = torch.ones(())
        if not self.quiet:
            Snapshot.draw()
        return self.layer(self.norm(images).flatten(1))


class Seen(Worst):
    def compute(self):
        return self.all.sum()  # how many samples it has seen


class Snapshot:
    """Keeps the state, the gradients and the random numbers with which the first step begins."""

    @staticmethod
    def draw():
        return torch.rand(()).item(), np.random.rand(), random.random()

    def on_start(self, run):
        run.log(started=1.0)
        Snapshot.state = {name: value.clone() for name, value in run.trainer.model.state_dict().items()}
        Snapshot.gradients = [weight.grad for weight in run.trainer.model.parameters()]
        Snapshot.drawn = self.draw()


def test_the_checks_before_the_first_step_leave_no_trace(tmp_path):
    overrides = [own("model", "Noisy"), own("+callbacks.snapshot", "Snapshot"), metric("Seen", "loss")]
    overrides.append(f"train.max_steps=3 trainer._target_={EXTENSIONS}.Doubled")
    drawn = []
    for quiet in (False, True):
        train(tmp_path / str(quiet), *overrides, f"+model.quiet={quiet}")
        drawn.append(Snapshot.drawn)
        assert Snapshot.state["calls"] == 0 == Snapshot.state["norm.num_batches_tracked"]
        assert "scale" not in Snapshot.state, "it is None until the first step"
        assert Snapshot.state["size"] == 0 and Snapshot.state["range"].tolist() == 0
        assert torch.equal(Snapshot.state["norm.running_mean"], torch.zeros(3))
        assert Snapshot.gradients == [None] * len(Snapshot.gradients)
    assert drawn[0] == drawn[1]
    assert checkpoint(tmp_path / "False")["model"]["norm.num_batches_tracked"] == 3
    lines = metrics(tmp_path / "False")
    assert [line["test_m"] for line in lines if "test_m" in line] == [64.0]
    assert lines[0]["rows"] == 32.0 and "evaluated" not in lines[0]


class Ranks:
    """Two threads in place of two processes. `gather` returns the values of both to each of them."""

    world_size = 2

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=60)
        self.values = [None, None]
        self.local = threading.local()

    def gather(self, value):
        self.values[self.local.rank] = value
        self.barrier.wait()
        every = list(self.values)
        self.barrier.wait()
        return every

    def sentence(self, rank, dataset, first, is_repeatable):
        """The sentence with which a process ends, "" if there is none."""
        self.local.rank = rank
        try:
            check_processes(self, "training", dataset, first, is_repeatable)
        except DataError as error:
            return str(error)
        return ""


def refused(datasets, firsts, repeatable=(True, True)):
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(Ranks().sentence, (0, 1), datasets, firsts, repeatable)
    assert one == other, "all processes end, or none"
    return one


def test_processes_with_other_datasets_are_refused_before_the_first_step():
    batch = {"image": torch.rand(2, 3, 4)}
    other = {"image": torch.rand(2, 3, 4)}
    rounded = {"image": batch["image"] + 1e-5}
    plain = [Images(True), Images(True)]
    assert "different lengths, [64, 65]: each process" in refused([Images(True), Images(True, 65)], [batch, batch])
    labelled = [Images(True), Images(True)]
    labelled[0].labels = np.arange(64)
    labelled[1].labels = np.arange(64)[::-1]
    assert "differ in labels: each process" in refused(labelled, [batch, batch])
    for different in (other, {**batch, "x": torch.ones(2)}, {"image": batch["image"].flip(0)}):
        assert "the first differ" in refused(plain, [batch, different])
    for repeatable in ((False, False), (True, False)):
        assert refused(plain, [batch, other], repeatable) == "", "its samples are never the same"
    assert refused(plain, [batch, rounded]) == "", "machines round differently"
    assert refused([Stream(True), Stream(True)], [batch, other]) == ""
    for part in ([0, 1], [2, 1]):
        parts = [Subset(Images(True), np.array(indices)) for indices in ([0, 1], part)]
        assert ("differ in the samples that validate" in refused(parts, [batch, batch])) == (part == [2, 1])


@pytest.mark.parametrize("kind", [Images, Stream])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("classes", (["a", "b"], ["b", "a"])),
        ("mean", ([0.5], [0.4])),
        ("std", ([0.5], None)),
        ("fits_task", ("multilabel", "regression")),
    ],
)
def test_processes_whose_datasets_differ_in_what_a_run_takes_from_them_are_refused(kind, name, values):
    datasets = [type("Own", (kind,), {name: value})(True) for value in values]
    batch = {"image": torch.ones(2, 3)}
    assert f"differ in {name}: each process" in refused(datasets, [batch, batch])
    assert refused(datasets[:1] * 2, [batch, batch]) == ""


class Shuffling:
    """A sampler whose order is what a function makes of it."""

    def __init__(self, order, **attributes):
        self.order = order
        vars(self).update(attributes)

    def __len__(self):
        return 64

    def __iter__(self):
        return iter(self.order(self))


def from_time(_):
    seed = int.from_bytes(os.urandom(4), "little")
    return torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()


def counting(sampler):
    sampler.epoch += 1
    return np.random.default_rng(sampler.epoch).permutation(64).tolist()


def in_place(sampler):
    random.shuffle(sampler.rows)
    return sampler.rows


ORDERS = {  # each with whether it is named
    "default_rng": (Shuffling(lambda _: np.random.default_rng().permutation(64).tolist()), True),
    "Random": (Shuffling(lambda _: random.Random().sample(range(64), 64)), True),
    "urandom": (Shuffling(from_time), True),
    "numpy": (Shuffling(lambda _: np.random.permutation(64)), False),
    "torch": (RandomSampler(range(64)), False),
    "weighted": (WeightedRandomSampler(torch.ones(64), 64), False),
    "counting": (Shuffling(counting, epoch=0), False),
    "in place": (Shuffling(in_place, rows=list(range(64))), False),
    "iterator": (Shuffling(lambda _: range(64), lock=threading.Lock()), False),
}


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize(("sampler", "is_named"), ORDERS.values(), ids=ORDERS)
def test_a_sampler_whose_order_cannot_be_repeated_is_named_and_the_check_leaves_no_trace(
    sampler, is_named, batch_size, caplog
):
    order = {"batch_sampler": BatchSampler(sampler, 8, False)} if batch_size else {"sampler": sampler}
    before = deepcopy({name: value for name, value in vars(sampler).items() if name in ("epoch", "rows")})
    seed_globals(0)
    drawn = Snapshot.draw()
    seed_globals(0)
    first = check_sampler(order, range(64), 3, SimpleNamespace(gather=lambda value: [value]))
    assert Snapshot.draw() == drawn
    assert before.items() <= vars(sampler).items()
    assert ("gives other indices when it is read again" in caplog.text) == is_named
    assert (first is None) == (is_named or hasattr(sampler, "lock"))


@pytest.mark.parametrize(
    ("key", "is_refused"),
    [
        ("seed", True),
        ("optim.lr", True),
        ("train.batch_size", True),
        ("task.label_smoothing", True),
        ("train.num_threads", False),
        ("data.root", False),
    ],
)
def test_processes_with_other_settings_of_what_is_trained_are_refused_by_the_key(key, is_refused):
    config = checked(composed(*FAST))
    others = SimpleNamespace(gather=lambda value: [value, value | ({key: "other"} if key in value else {})])
    sentence = rf"^{key} is .* in the first process, and other in another"
    with pytest.raises(ConfigError, match=sentence) if is_refused else nullcontext():
        check_settings(others, config)


def test_of_large_batches_as_many_are_read_as_have_a_thousand_indices():
    batches = [[*range(256)]] * 1000
    assert first_indices({"batch_sampler": batches}, range(256), 0) == batches[:4]


def test_processes_whose_samplers_give_other_indices_are_refused():
    others = SimpleNamespace(gather=lambda value: [value, value and value[::-1]])
    with pytest.raises(ConfigError, match="other indices in each process"):
        check_sampler({"sampler": range(64)}, range(64), 0, others)
    check_sampler({"batch_sampler": [[0, 1], [2, 3]]}, range(64), 0, others)


class Strengthening:
    """Transforms a batch by what it has kept of the calls before; `kept` says how."""

    def __init__(self, kept="calls"):
        self.kept = kept
        self.calls = 0
        self.cache = {}
        self.previous = 0
        self.rng = np.random.default_rng(0)

    def __call__(self, images):
        self.calls += 1
        self.cache.setdefault("half", images.new_tensor(0.5))
        previous = self.previous
        self.previous = images.mean()
        changed = {
            "calls": images / self.calls,
            "previous": images / 2 + previous,
            "own generator": images * np.random.default_rng().random(),
            "nothing": images * torch.rand(()) * self.rng.random() * self.cache["half"],
        }
        return changed[self.kept]


@pytest.mark.parametrize("kept", ["calls", "previous", "own generator", "nothing"])
def test_a_transform_of_batches_that_cannot_be_repeated_is_named(kept, tmp_path, caplog):
    transform = f"augment.transform={{_target_: {__name__}.Strengthening, kept: {kept}}}"
    train(tmp_path, transform, "train.max_steps=1")
    assert ("gives another batch when the first one is augmented again" in caplog.text) == (kept != "nothing")
