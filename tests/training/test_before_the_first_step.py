"""Before the first step a run passes two samples through all of its parts: what does not fit ends in a sentence.

The sentence has the value and the remedy. What fits leaves no trace.
"""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.configs import DOORS, LINEAR, checkpoint, metrics, steps, train
from tests.training.doors import Images, Stream, Worst
from training.checks import check_dataset
from training.tasks import Classification
from training.trainer import Trainer

HERE = __name__
IMAGES = [f"data._target_={DOORS}.Images", "data.length=64", "train.batch_size=16", LINEAR]


# What does not fit


class Faulty(Images):
    """`fault` is one mistake in the samples."""

    def __init__(self, train: bool, fault: str, **options: Any) -> None:
        super().__init__(train, **options)
        self.fault = fault
        if fault == "no classes":
            self.classes = ()
        if fault == "empty":
            self.length = 0

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return {
            "a wrong label": (image, label + 1),
            "three fields": (image, label, 7),
            "no label": (image, None),
            "one field": (image,),
            "other test images": (image if self.train else image[:6], label),
        }[self.fault]


class NoItems:
    classes = ("a", "b")

    def __init__(self, train: bool, **_: Any) -> None: ...

    def __iter__(self) -> Any:
        return iter([])


class Wide(nn.Sequential):
    def __init__(self, in_channels: int, **_: Any) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, 1000))


def four_channels(**_: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, 2))


def forgets_return(**_: Any) -> None:
    nn.Linear(3, 2)


def collate_to_object(samples: list[Any]) -> Any:
    return SimpleNamespace(image=torch.stack([image for image, _ in samples]))


def mistakes(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) != labels).float().mean()


class Unscored(Trainer):
    def evaluation_step(self, batch: dict[str, Any]) -> Any:
        (images,), labels = self.inputs_and_labels(batch)
        return self.task.loss(self.model(images), labels)


class PerSample(Trainer):
    """Forgets the mean."""

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        return super().training_step(batch).expand(len(batch["label"]))


class Detached(Trainer):
    def training_step(self, batch: dict[str, Any]) -> Tensor:
        return super().training_step(batch).detach()


class Forgetful(Trainer):
    def training_step(self, batch: dict[str, Any]) -> Any:
        super().training_step(batch)


class Uncomputable(Worst):
    def compute(self) -> Any:
        raise TypeError("not of such labels")


SYNTHETIC = "data._target_=data.synthetic.Synthetic"  # its samples are dicts


def fault(name: str) -> list[str]:
    return [f"data._target_={HERE}.Faulty", f"+data.fault='{name}'"]


def trainer(name: str) -> str:
    return f"trainer._target_={HERE}.{name}"


def model(name: str) -> str:
    return f"model._target_={HERE}.{name}"


NOT_FITTING = {
    # the samples
    "a label out of range": (fault("a wrong label"), ["label", r"\b2\b", r"0 (to|and) 1"]),
    "a sample without label": (fault("no label"), ["Faulty", "None"]),
    "a tuple with a field more": (fault("three fields"), [r"\b3\b", r"task\.inputs|image"]),
    "a tuple with a field less": (fault("one field"), [r"\b1\b", r"task\.inputs|image"]),
    "no classes": (fault("no classes"), ["Faulty", "classes", "task=regression"]),
    "no samples": (fault("empty"), ["Faulty", "sample"]),
    "no __getitem__": ([f"data._target_={HERE}.NoItems"], ["NoItems", "__getitem__"]),
    "a stream without an end": ([f"data._target_={DOORS}.Stream"], [r"train\.steps_per_epoch", "Stream"]),
    "a batch larger than the set": (["train.batch_size=300"], [r"train\.batch_size=300", r"\b64\b"]),
    "a collate that returns an object": (
        [f"data.collate={{_target_: {HERE}.collate_to_object}}"],
        [r"data\.collate|batch", "SimpleNamespace|dict"],
    ),
    "a collate for a dataset with read_batch": (
        [SYNTHETIC, "data.collate={_target_: data.collate.pad}"],
        [r"data\.collate", "Synthetic", "__getitem__"],
    ),
    # names
    "a field that is not there": (["task.inputs=picture", SYNTHETIC], ["picture", "image"]),
    "a label that is not there": (["task.label=lable", SYNTHETIC], ["lable", "label"]),
    "a metric that is not there": (["task.metric=acuracy"], [r"task\.metric=acuracy", "accuracy"]),
    "a metric of part of a name": (
        [f"task.metrics={{m: {{_target_: {DOORS}.Several}}}}", "task.metric=m_wurst"],
        [r"task\.metric=m_wurst", "m_worst"],
    ),
    # the network
    "another number of channels": ([model("four_channels")], [r"2, 3, 8, 8", "model|four_channels|Sequential"]),
    "other images to test": (fault("other test images"), [r"6, 8", "test"]),
    "another number of outputs": ([model("Wide")], ["1000", r"\b2\b"]),
    "a network that is none": ([model("forgets_return")], ["model", "None", "return"]),
    # the loss and the scores
    "a loss that does not fit": (["task.loss={_target_: torch.nn.MSELoss}", SYNTHETIC], ["Classification", "10"]),
    "a loss without gradient": ([f"task.loss={{_target_: {HERE}.mistakes}}"], ["gradient"]),
    "a loss that takes no shares of mixup": (
        ["augment.mixup=0.2", "task.loss={_target_: torch.nn.MultiMarginLoss}"],
        ["loss|augment|mixup"],
    ),
    "class weights that do not fit": (["task.class_weights=[1,2,3]"], ["weight", r"\b3\b", r"\b2\b"]),
    "a score that is no function": (["task.scores={s: my.f}"], [r"task\.scores", "_target_"]),
    # steps and metrics of a fork
    "a loss per sample": ([trainer("PerSample")], [r"\(2,\)|\(16,\)", "mean"]),
    "a loss that was detached": ([trainer("Detached")], ["gradient"]),
    "a step that returns nothing": ([trainer("Forgetful")], ["Forgetful|training_step", "None|return"]),
    "scores without names": ([trainer("Unscored")], ["evaluation_step", "dict|name"]),
    "a metric without update": (["task.metrics={f: {_target_: torch.nn.Flatten}}"], ["Flatten", "update"]),
    "a metric that cannot be computed": (
        [f"task.metrics={{u: {{_target_: {HERE}.Uncomputable}}}}"],
        [r"task\.metrics", "not of such labels"],
    ),
    # the rest of the run
    "a function without a target": (["data.collate=data.collate.pad"], [r"data\.collate", "_target_"]),
    "a schedule that looks at a score": (
        ["schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"],
        ["ReduceLROnPlateau", "callback|trainer"],
    ),
    "two samplers": (
        [f"sampler._target_={DOORS}.backwards", f"batch_sampler._target_={DOORS}.Pairs"],
        ["batch_sampler", r"(?<!batch_)sampler"],
    ),
    "a checkpoint interval of no time": (["train.checkpoint_every=0min"], [r"train\.checkpoint_every=0min", "10min"]),
    "no epoch": (["train.epochs=0"], [r"train\.epochs=0", r"\b1\b"]),
    "an unknown precision": (["train.precision=fp8"], ["fp8", "bf16"]),
    "an unknown device": (["device=gpu"], ["gpu", "cuda"]),
}


@pytest.mark.parametrize("case", NOT_FITTING)
def test_what_does_not_fit_ends_in_a_sentence_with_the_value_and_the_remedy(tmp_path, error, case):
    overrides, patterns = NOT_FITTING[case]
    with error(*patterns):
        train(tmp_path, *IMAGES, *overrides)
    assert not (tmp_path / "metrics.jsonl").exists() and not list(tmp_path.glob("checkpoints/*"))


# What fits


class OneOfAStream(IterableDataset):
    classes = Stream.classes

    def __init__(self, train: bool, **_: Any) -> None: ...

    def __iter__(self) -> Any:
        yield torch.ones(8, 8, 3, dtype=torch.uint8), 3


class Broken(Images):
    """Its first two samples cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index < 2:
            raise OSError(f"{index}.png is truncated")
        return super().__getitem__(index)


class Unlabelled(Images):
    def __getitem__(self, index: int) -> Any:
        return {"image": super().__getitem__(index)[0]}


def collate_to_dict(samples: list[Any]) -> dict[str, Any]:
    images, labels = zip(*samples, strict=True)
    return {"image": torch.stack(images), "label": torch.tensor(labels), "names": ["a"] * len(images)}


def confident(outputs: Tensor, labels: None) -> Tensor:
    return -outputs.softmax(1).amax(1).log().mean()


FITTING = {
    "one sample": ["data.length=1", "data.test_length=1", "train.batch_size=1"],
    "a last batch of one sample": ["data.length=17", "train.last_batch=keep"],
    "a stream of one sample": [
        *(f"data._target_={HERE}.OneOfAStream", "train.steps_per_epoch=2", "train.batch_size=1", "loader=workers"),
        *("loader.streams=1", "loader.num_workers=0"),
    ],
    "worker processes": ["loader=workers", "loader.num_workers=1"],
    "a collate that returns a dict": [f"data.collate={{_target_: {HERE}.collate_to_dict}}"],
    "no label": [
        *(f"data._target_={HERE}.Unlabelled", "task=own", "task.label=null", "+model.num_classes=2"),
        f"task.loss={{_target_: {HERE}.confident}}",
    ],
    "first samples that cannot be read": [
        *(f"data._target_={HERE}.Broken", "loader=workers", "loader.on_error=skip", "loader.num_workers=0")
    ],
    "float images": [f"data._target_={HERE}.Floats"],
}


class Floats(Images):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image.permute(2, 0, 1) / 255, label


@pytest.mark.parametrize("case", FITTING)
def test_what_fits_trains(tmp_path, case):
    summary = train(tmp_path, *IMAGES, "train.epochs=1", *FITTING[case])
    assert np.isfinite(summary["test_loss"]) and steps(tmp_path)[0]["loss"] > 0


def test_a_batch_of_debug_fast_is_capped_to_the_set(tmp_path, command):
    done = command("debug=fast", "data=synthetic", "data.length=64", "data.image_size=8", "hydra.run.dir=out")
    assert done.code == 0, done.shown


# No trace


class Noisy(nn.Module):
    """Counts in buffers, and draws random numbers, in each forward pass, unless `quiet`."""

    def __init__(self, num_classes: int, in_channels: int, quiet: bool = False, **_: Any) -> None:
        super().__init__()
        self.quiet, self.norm = quiet, nn.BatchNorm2d(in_channels)
        self.layer = nn.Linear(64 * in_channels, num_classes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        if not self.quiet:
            torch.rand(3), np.random.rand(), random.random()
        return self.layer(self.norm(images).flatten(1))


class CountingMetric(Worst):
    """Draws random numbers, and returns how many samples it has seen."""

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        torch.rand(1)
        super().update(outputs, labels)

    def compute(self) -> Tensor:
        return self.all.sum()


class Snapshot:
    """Keeps what the first step begins with."""

    def on_start(self, run: Any) -> None:
        run.log(started=1.0)
        model = run.trainer.model
        Snapshot.randoms = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        Snapshot.state = {name: value.clone() for name, value in model.state_dict().items()}
        Snapshot.gradients = [weight.grad for weight in model.parameters()]


def test_the_checks_before_the_first_step_leave_no_trace(tmp_path):
    overrides = [model("Noisy"), f"task.metrics={{seen: {{_target_: {HERE}.CountingMetric}}}}", "train.max_steps=3"]
    overrides += [f"+callbacks.snapshot._target_={HERE}.Snapshot", f"trainer._target_={DOORS}.Doubled"]
    randoms = []
    for quiet in (False, True):
        train(tmp_path / str(quiet), *overrides, f"+model.quiet={quiet}")
        randoms.append(Snapshot.randoms)
        assert Snapshot.state["calls"] == 0 == Snapshot.state["norm.num_batches_tracked"]
        assert torch.equal(Snapshot.state["norm.running_mean"], torch.zeros(3))
        assert Snapshot.gradients == [None] * len(Snapshot.gradients)
    one, other = randoms
    assert torch.equal(one[0], other[0]) and one[1:] == other[1:]
    saved = checkpoint(tmp_path / "False")["model"]
    assert saved["norm.num_batches_tracked"] == 3
    lines = metrics(tmp_path / "False")
    assert [line["test_seen"] for line in lines if "test_seen" in line] == [64.0]
    assert lines[0]["rows"] == 32.0 and "evaluated" not in lines[0]


# For a fork's own tests


def test_a_fork_may_check_its_dataset_in_a_test(error):
    batch = check_dataset(Images(train=True), Classification(Images(train=True)))
    assert batch["image"].shape == (2, 8, 8, 3) and batch["label"].tolist() == [0, 1]
    with error("label", r"\b2\b"):
        check_dataset(Faulty(True, "a wrong label"), Classification(Images(train=True)))
