"""Before the first step a run passes two samples through all of its parts: what does not fit ends in a sentence.

The sentence has the value and the remedy. What fits passes, and the checks leave no trace: see test_what_fits.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.configs import DOORS, LINEAR, train
from tests.training.doors import Images, Worst
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
            "other test images": (image if self.train else image[:6], label),
        }[self.fault]


class NoItems:
    classes = ("a", "b")

    def __init__(self, train: bool, **_: Any) -> None: ...

    def __iter__(self) -> Any:
        return iter([])


class Normed(nn.Sequential):
    def __init__(self, in_channels: int, **_: Any) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64 * in_channels, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


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


class Forgetful(Trainer):
    def training_step(self, batch: dict[str, Any]) -> Any:
        super().training_step(batch)


class Uncomputable(Worst):
    def compute(self) -> Any:
        raise TypeError("not of such labels")


class NeedsMore(Worst):
    """Cannot be computed on two samples."""

    def compute(self) -> Any:
        if self.all.sum() < 3:
            raise ValueError("too few")
        return {"x": 0.5}


def test_a_metric_that_needs_more_samples_is_named_by_the_first_evaluation(tmp_path, error):
    needs_more = [LINEAR, f"task.metrics={{m: {{_target_: {HERE}.NeedsMore}}}}", "task.higher_is_better=true"]
    for metric in ("accuracies", "m_y"):
        with error(f"task.metric={metric}: it is one of .*accuracy"):
            train(tmp_path / metric, *needs_more, f"task.metric={metric}")
    assert not (tmp_path / "accuracies" / "metrics.jsonl").exists()


SYNTHETIC = "data._target_=data.synthetic.Synthetic"  # its samples are dicts


def own(key: str, name: str) -> str:
    return f"{key}._target_={HERE}.{name}"


def fault(name: str) -> list[str]:
    return [own("data", "Faulty"), f"+data.fault='{name}'"]


NOT_FITTING = {
    # the samples
    "a label out of range": (fault("a wrong label"), ["label", r"\b2\b", r"0 (to|and) 1"]),
    "a sample without label": (fault("no label"), ["Faulty", "None"]),
    "a tuple with a field more": (fault("three fields"), [r"\b3\b", r"task\.inputs|image"]),
    "no classes": (fault("no classes"), ["Faulty", "classes", "task=regression"]),
    "no samples": (fault("empty"), ["Faulty", "sample"]),
    "no __getitem__": ([own("data", "NoItems")], ["NoItems", "__getitem__"]),
    "a stream without an end": ([f"data._target_={DOORS}.Stream"], [r"train\.steps_per_epoch", "Stream"]),
    "a batch larger than the set": (["train.batch_size=300"], [r"train\.batch_size=300", r"\b64\b"]),
    "a collate that returns an object": (
        [f"data.collate={{_target_: {HERE}.collate_to_object}}"],
        [r"data\.collate|batch", "SimpleNamespace|dict"],
    ),
    # names
    "a field that is not there": (["task.inputs=picture", SYNTHETIC], ["picture", "image"]),
    "a score without a direction": (
        [f"task.scores={{lossless: {{_target_: {HERE}.mistakes}}}}", "task.metric=lossless"],
        ["task.metric=lossless", r"task\.higher_is_better=true or false"],
    ),
    "a metric that is not there": (
        [f"task.metrics={{m: {{_target_: {DOORS}.Several}}}}", "task.metric=m_wurst"],
        [r"task\.metric=m_wurst", "m_worst", "accuracy"],
    ),
    # the network
    "other images to test": (fault("other test images"), [r"6, 8", "test"]),
    "another number of outputs": (["+model.num_classes=1000"], ["1000", r"\b2\b"]),
    "a network that is none": ([own("model", "forgets_return")], ["model", "None", "return"]),
    "a norm that gets one sample": (
        [own("model", "Normed"), "train.batch_size=4", "train.accumulate=3"],
        [r"train\.last_batch=drop", r"train\.accumulate"],
    ),
    "a norm with a last batch of one": (
        [own("model", "Normed"), "data.length=65", "train.last_batch=keep"],
        [r"train\.last_batch=drop", r"train\.accumulate"],
    ),
    "a frozen part that is not there": (["train.freeze=features"], [r"train\.freeze=features", r"\b1\b"]),
    # the loss and the scores
    "a loss without gradient": ([f"task.loss={{_target_: {HERE}.mistakes}}"], ["gradient"]),
    "a loss that takes no shares of mixup": (
        ["augment.mixup=0.2", "task.loss={_target_: torch.nn.MultiMarginLoss}"],
        ["loss|augment|mixup|target"],
    ),
    # steps and metrics of a fork
    "a loss per sample": ([own("trainer", "PerSample")], [r"\(2,\)|\(16,\)", "mean"]),
    "a step that returns nothing": ([own("trainer", "Forgetful")], ["Forgetful|training_step", "None|return"]),
    "scores without names": ([own("trainer", "Unscored")], ["evaluation_step", "dict|name"]),
    "a metric that cannot be computed": (
        [f"task.metrics={{u: {{_target_: {HERE}.Uncomputable}}}}"],
        [r"task\.metrics", "not of such labels"],
    ),
    # the rest of the run
    "a function without a target": (["data.collate=data.collate.pad"], [r"data\.collate", "_target_"]),
    "a callback without methods": (["+callbacks.mine._target_=torch.nn.ReLU"], [r"callbacks\.mine", "on_step"]),
    "a schedule that looks at a score": (
        ["schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"],
        ["ReduceLROnPlateau", "callback|trainer"],
    ),
    "two samplers": (
        [f"sampler._target_={DOORS}.backwards", f"batch_sampler._target_={DOORS}.Pairs"],
        ["batch_sampler", r"(?<!batch_)sampler"],
    ),
    "half a step between checkpoints": (["train.checkpoint_every=0.5"], [r"train\.checkpoint_every=0\.5", "10min"]),
    "no checkpoint to keep": (["train.keep_checkpoints=0"], [r"train\.keep_checkpoints=0", "from 1"]),
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


# For a fork's own tests


def test_a_fork_may_check_its_dataset_in_a_test(error):
    batch = check_dataset(Images(train=True), Classification(Images(train=True)))
    assert batch["image"].shape == (2, 8, 8, 3) and batch["label"].tolist() == [0, 1]
    with error("label", r"\b2\b"):
        check_dataset(Faulty(True, "a wrong label"), Classification(Images(train=True)))
