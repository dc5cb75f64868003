"""Classes as users write them: datasets, tasks, losses, networks. Each trains, resumes, evaluates and predicts.

The oracle is a plain PyTorch loop over the same samples: equal losses, scores, weights and predictions.
"""

import importlib
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset, default_collate

from data.collate import pad
from data.subset import split
from tests.configs import checkpoint, steps, train
from tests.infrastructure.forks import ROOT
from training.tasks import Task

TRAINED = 20
TESTED = 10
SIZE = 4
EPOCHS = 1
LR = 0.05
DECAY = 0.1
COMMON = (
    f"train.batch_size={SIZE} train.epochs={EPOCHS} train.log_interval=5 schedule=constant optim.lr={LR} "
    f"optim.momentum=0 optim.nesterov=false optim.weight_decay={DECAY} sampler._target_={__name__}.in_order"
)


def in_order(dataset):
    return range(len(dataset))


def drawn(index, train):
    return np.random.default_rng([index, train])


class Pictures:
    """Samples (uint8 array (H, W, 3), int); attributes are lists."""

    classes = ["a", "b", "c"]  # noqa: RUF012

    def __init__(self, train, **_):
        self.train = train
        self.labels = [index % 3 for index in range(len(self))]

    def __len__(self):
        return TRAINED if self.train else TESTED

    def image(self, index):
        return drawn(index, self.train).integers(0, 200, (6, 6, 3), np.uint8) + np.uint8(25 * (index % 3))

    def __getitem__(self, index):
        return self.image(index), index % 3


class Arrays(Pictures):
    """Samples are dicts; attributes are arrays, tensors and numpy's strings."""

    classes = np.array(["a", "b", "c"])
    mean = torch.full((3, 1, 1), 0.4)
    std = np.full(3, 0.3)

    def __init__(self, train, **_):
        super().__init__(train)
        self.labels = torch.tensor([min(2, index % 5) for index in range(len(self))])

    def __getitem__(self, index):
        return {"image": torch.from_numpy(self.image(index)), "label": self.labels[index], "name": np.str_("x")}


class Grey(Pictures):
    """One channel, labels (1,), and samples that are lists."""

    mean = np.float64(0.5)
    std = torch.tensor([0.25])

    def __getitem__(self, index):
        return [self.image(index)[..., :1], np.array([index % 3], np.uint8)]


Sample = namedtuple("Sample", "image label")


class Shares(Pictures):
    """Samples are named tuples of a float image (C, H, W) and the shares of the classes."""

    def __getitem__(self, index):
        image = torch.from_numpy(self.image(index)).permute(2, 0, 1) / 255
        return Sample(image, torch.tensor([0.8, 0.1, 0.1]).roll(index).double())


class Several(Pictures):
    """Each sample has several classes: an array of bools."""

    def __getitem__(self, index):
        return self.image(index), np.array([index % 2, index % 3 == 0, True]).astype(bool)


class Masks(Pictures):
    """Each pixel has a class. In some masks most pixels are 255, which the loss ignores."""

    def __getitem__(self, index):
        image = self.image(index)
        mask = (image[..., 0] // 100).astype(np.int64)
        mask.flat[: 34 if index % 4 else 0] = 255
        return image, mask


class Rows:
    """Rows of two tables, and a Python float as the label. The dataset has no attributes."""

    numbers = 1

    def __init__(self, train, **_):
        self.train = train

    def __len__(self):
        return TRAINED if self.train else TESTED

    def __getitem__(self, index):
        left, right = drawn(index, self.train).normal(size=(2, 3)).astype(np.float32)
        return {"left": left, "right": torch.from_numpy(right), "y": self.label(float(left.sum()))}

    def label(self, number):
        return number


class PairArrays(Rows):
    def label(self, number):
        return np.array([number, -number])


class Words(Pictures):
    """Sequences of different lengths."""

    def __getitem__(self, index):
        return {"words": torch.full((1 + index % 4,), index % 3), "label": index % 3}


class Numbers(IterableDataset):
    """A stream of (float (3,), int)."""

    classes = ("a", "b", "c")

    def __init__(self, train, **_):
        self.length = TRAINED if train else TESTED

    def __iter__(self):
        for index in range(self.length):
            yield torch.from_numpy(drawn(index, True).normal(size=3).astype(np.float32)) + index % 3, index % 3


class Flat(nn.Sequential):
    def __init__(self, num_classes, in_channels):
        super().__init__(nn.Flatten(), nn.Linear(36 * in_channels, num_classes))


class Lazy(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(num_classes))


class Pixels(nn.Conv2d):
    def __init__(self, num_classes, in_channels):
        super().__init__(in_channels, num_classes, 1)


class Joined(nn.Module):
    """Takes two fields."""

    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(6, num_classes)

    def forward(self, left, right):
        return self.layer(torch.cat([left, right], 1))


class Dicts(Joined):
    def forward(self, left, right):
        return {"value": super().forward(left, right), "distance": left - right}


class Bag(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.words = nn.Embedding(3, 4)
        self.head = nn.Linear(4, num_classes)

    def forward(self, words, lengths):
        kept = torch.arange(words.shape[1]) < lengths[:, None]
        return self.head((self.words(words) * kept[..., None]).sum(1) / lengths[:, None])


class Three(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(3, num_classes)


class OfPixels(Task):
    def __init__(self, dataset, **options):
        super().__init__(dataset, **options)
        self.num_outputs = 3

    def scores(self, outputs, labels):
        return {"pixels": (outputs.argmax(1) == labels).float()}


class OfDicts(Task):
    """The network's outputs are a dict."""

    def loss(self, outputs, labels):
        return (outputs["value"][:, 0] - labels).square().mean()

    def scores(self, outputs, labels):
        return {"far": outputs["distance"].abs().sum(1)}


def itself(outputs, labels):
    return outputs.square().mean()


def wrong(outputs, labels):
    return (outputs.argmax(1) != labels).float()


class Largest:
    """A metric of an epoch."""

    higher_is_better = False

    def reset(self):
        self.value = torch.zeros(())

    def update(self, outputs, labels):
        assert outputs.shape == labels.shape
        self.value = torch.maximum(getattr(self, "value", torch.zeros(())), (outputs - labels).abs().max())

    def compute(self):
        return self.value


@dataclass
class Case:
    """A user's classes and settings, and the loss and scores in plain PyTorch: functions of outputs and labels."""

    dataset: Any
    network: Any
    settings: str
    loss: Callable[[Any, Any], Tensor]
    scores: dict[str, Callable[[Any, Any], Tensor]] = field(default_factory=dict)
    inputs: tuple[str, ...] = ("image",)
    label: str | None = "label"
    collate: Callable[[list[Any]], Any] = default_collate


def accuracy(outputs, labels):
    return (outputs.argmax(1) == labels.flatten()).float()


def mse(outputs, labels):
    return functional.mse_loss(outputs, labels.float())  # torch 2.9 takes no labels of another dtype


def mae(outputs, labels):
    return (outputs - labels).abs().mean(1)


def entropy(outputs, labels):
    return functional.cross_entropy(outputs, labels.long().flatten())


def right_pixels(outputs, labels):
    """The share of each mask, without the pixels that the loss ignores."""
    masks = zip(outputs.argmax(1), labels, strict=True)
    return torch.stack([(mask == label)[label != 255].float().mean() for mask, label in masks])


def balanced(outputs, labels):
    counts = torch.bincount(Arrays(True).labels)
    return functional.cross_entropy(outputs, labels, TRAINED / (3 * counts))


def own(key, name):
    return f"{key}._target_={__name__}.{name}"


def function(key, target, options=""):
    return f"{key}={{_target_: {target}{options}}}"


TABLE = {"inputs": ("left", "right"), "label": "y", "scores": {"mae": mae}}
FIELDS = "task=regression task.inputs=[left,right] task.label=y"
IGNORING = function("task.loss", "torch.nn.CrossEntropyLoss", ", ignore_index: 255")
CASES = {
    "a tuple of an array and an int, part of it validates": Case(
        Pictures, Flat, "data.val_fraction=0.2", entropy, {"accuracy": accuracy}
    ),
    "a dict, arrays and tensors as attributes, balanced classes": Case(
        Arrays, Flat, "task.class_weights=balanced", balanced, {"accuracy": accuracy}
    ),
    "a list, a grey image, labels (1,), lazy weights": Case(Grey, Lazy, "", entropy, {"accuracy": accuracy}),
    "a named tuple, floats, shares of classes": Case(
        Shares,
        Flat,
        "",
        functional.cross_entropy,
        {"accuracy": lambda outputs, labels: accuracy(outputs, labels.argmax(1))},
    ),
    "several classes, as bools": Case(
        Several,
        Flat,
        "task=multilabel",
        lambda outputs, labels: functional.binary_cross_entropy_with_logits(outputs, labels.float()),
        {"exact": lambda outputs, labels: ((outputs > 0) == labels).all(1).float()},
    ),
    "pixels, most of them ignored, in three parts": Case(
        Masks,
        Pixels,
        f"task=own {own('task', 'OfPixels')} task.label=label {IGNORING} train.accumulate=3",
        lambda outputs, labels: functional.cross_entropy(outputs, labels, ignore_index=255),
        {"pixels": right_pixels},
    ),
    "two numbers and a metric of an epoch": Case(
        PairArrays,
        Joined,
        f"{FIELDS} task.numbers=2 task.metrics={{largest: {{_target_: {__name__}.Largest}}}}",
        mse,
        **TABLE,
    ),
    "outputs in a dict": Case(
        Rows,
        Dicts,
        f"task=own {own('task', 'OfDicts')} task.inputs=[left,right] task.label=y",
        lambda outputs, labels: (outputs["value"][:, 0] - labels).square().mean(),
        **{**TABLE, "scores": {"far": lambda outputs, labels: outputs["distance"].abs().sum(1)}},
    ),
    "no label": Case(
        Rows,
        Joined,
        "task=own task.inputs=[left,right] " + function("task.loss", f"{__name__}.itself"),
        itself,
        inputs=("left", "right"),
        label=None,
    ),
    "words of different lengths, a score of one's own": Case(
        Words,
        Bag,
        "task.inputs=[words,words_length] data.collate={_target_: data.collate.pad} "
        f"task.scores={{error: {{_target_: {__name__}.wrong}}}}",
        entropy,
        {"accuracy": accuracy, "error": wrong},
        inputs=("words", "words_length"),
        collate=pad,
    ),
    "a stream": Case(
        Numbers,
        Three,
        "task.inputs=number train.steps_per_epoch=5 loader=workers loader.streams=1 sampler._target_=null",
        entropy,
        {"accuracy": accuracy},
        inputs=("number",),
    ),
}


class Plain:
    """The oracle: the loop as it is written without this repository."""

    def __init__(self, case, outputs, kept):
        self.case = case
        self.kept = kept
        first = self.batch(case.dataset(True), kept[:1])[0][0]
        options = {"in_channels": first.shape[1]} if case.network in (Flat, Pixels) else {}
        torch.manual_seed(0)
        self.network = case.network(num_classes=outputs, **options)
        with torch.no_grad():
            self.network(*self.batch(case.dataset(True), [0, 1])[0])
        weights = [weight for weight in self.network.parameters() if weight.ndim > 1]
        biases = [bias for bias in self.network.parameters() if bias.ndim == 1]
        groups = [{"params": weights, "weight_decay": DECAY}, {"params": biases}]
        optimizer = torch.optim.SGD(groups, lr=LR)
        self.losses = []
        for _ in range(EPOCHS):
            for start in range(0, len(kept) // SIZE * SIZE, SIZE):
                inputs, labels = self.batch(case.dataset(True), kept[start : start + SIZE])
                loss = case.loss(self.network(*inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.losses.append(loss.item())
        self.scores = self.evaluate()

    def batch(self, dataset, indices):
        samples = list(dataset) if isinstance(dataset, IterableDataset) else dataset
        batch = self.case.collate([samples[int(index)] for index in indices])
        names = [*self.case.inputs, *([self.case.label] if self.case.label else [])]
        fields = batch if isinstance(batch, dict) else dict(zip(names, batch, strict=True))
        return [self.normalized(fields[name], dataset) for name in self.case.inputs], fields.get(self.case.label)

    def normalized(self, images, dataset):
        if images.dtype != torch.uint8:
            return images
        mean = torch.as_tensor(getattr(dataset, "mean", 0.5)).float()
        std = torch.as_tensor(getattr(dataset, "std", 0.25)).float()
        images = images.permute(0, 3, 1, 2) / 255
        return (images - mean.reshape(-1, 1, 1)) / std.reshape(-1, 1, 1)

    def evaluate(self):
        inputs, labels = self.batch(self.case.dataset(False), range(TESTED))
        with torch.no_grad():
            outputs = self.network(*inputs)
        scores = {name: score(outputs, labels).float().mean().item() for name, score in self.case.scores.items()}
        return {"loss": self.case.loss(outputs, labels).item(), **scores}


@pytest.mark.parametrize("name", CASES)
def test_classes_as_users_write_them_train_resume_evaluate_and_predict_as_a_plain_loop_does(name, tmp_path):
    case = CASES[name]
    model = own("model", case.network.__name__)
    settings = f"{COMMON} {own('data', case.dataset.__name__)} ~model.size=14 {model} {case.settings}".strip()
    if "task=" not in settings:
        settings += " task.label_smoothing=0"  # only classification has this key
    train(tmp_path, settings, "train.max_steps=3")
    summary = train(tmp_path, settings)  # which resumes

    is_split = "data.val_fraction=0.2" in settings
    kept = split(case.dataset(True), 0.2)[0].indices if is_split else np.arange(TRAINED)
    outputs = 3 if hasattr(case.dataset, "classes") else 2 if "task.numbers=2" in settings else 1
    plain = Plain(case, outputs, kept)
    trained = checkpoint(tmp_path)["model"]
    for key, weights in plain.network.state_dict().items():
        torch.testing.assert_close(trained[key], weights, rtol=1e-4, atol=1e-5)
    before = 0
    for line in steps(tmp_path):
        assert line["loss"] == pytest.approx(np.mean(plain.losses[before : line["step"]]), abs=1e-4)
        before = line["step"]
    scores = {key: summary[f"test_{key}"] for key in plain.scores}
    assert scores == pytest.approx(plain.scores, abs=1e-4)
    if (ROOT / "extras" / "finished").exists():
        check_finished(case, plain, tmp_path / "checkpoints" / "last.pt")


def check_finished(case, plain, file):
    """evaluate.py and predict.py agree with the oracle."""
    names = "evaluate", "predict", "samples", "finished_run"
    evaluate, predict, samples, finished = (importlib.import_module(f"extras.finished.{name}") for name in names)
    run = finished.FinishedRun(file)
    dataset = run.dataset("test")
    count, scores, _ = evaluate.evaluate(run, dataset)
    assert count == TESTED
    assert {key: scores[key] for key in plain.scores} == pytest.approx(plain.scores, abs=1e-4)
    if case.collate is pad or case.dataset is Numbers:  # data.collate is not used; a stream has no length
        return
    read = samples.Samples(list("abcdefghij"), partial(samples.read_inputs, run.task.inputs, dataset))
    rows = list(predict.records(run, read, file.parent))
    with torch.no_grad():
        outputs = plain.network(*plain.batch(case.dataset(False), range(TESTED))[0])
    assert [row["file"] for row in rows] == list("abcdefghij")
    if "class" in rows[0]:
        assert [row["class"] for row in rows] == ["abc"[number] for number in outputs.argmax(1).tolist()]
        return
    columns = [key for key in rows[0] if key.startswith(("value", "prediction", "probability"))]
    values = torch.tensor([[row[key] for key in columns] for row in rows])
    expected = outputs["value"] if isinstance(outputs, dict) else outputs
    expected = expected.sigmoid() if case.dataset is Several else expected
    torch.testing.assert_close(values.flatten(), expected.flatten(), rtol=1e-3, atol=1e-4)
