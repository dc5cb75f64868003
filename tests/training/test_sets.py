"""Whole runs with datasets as users write them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from data.errors import DataError
from tests.configs import DOORS, LINEAR, checkpoint, metrics, train
from tests.training.doors import Images

HERE = __name__
IMAGES = [f"data._target_={DOORS}.Images", "train.batch_size=16", "data.length=64", LINEAR]
OWN = f"data._target_={HERE}"


@pytest.mark.parametrize("loader", ["torch", "prefetch", "resident", "threads"])
def test_a_dataset_of_tuples_trains_without_describing_its_images(tmp_path, loader):
    assert train(tmp_path, *IMAGES, f"loader={loader}", "augment.erase=0.5")["test_accuracy"] == 1.0


def test_a_validation_split_chooses_the_best_checkpoint_and_the_test_set_is_evaluated_once(tmp_path):
    summary = train(tmp_path, *IMAGES, "data.val_fraction=0.25")
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "val_accuracy" in line] == [3, 6]
    assert [line["step"] for line in lines if "test_accuracy" in line] == [6]
    assert summary["score"] == "val_accuracy" and {"test_accuracy", "val_loss"} <= summary.keys()


def test_an_evaluation_may_be_of_some_steps_only_and_a_stream_has_epochs_of_as_many_steps_as_it_is_told(tmp_path):
    stream = [f"data._target_={DOORS}.Stream", "train.steps_per_epoch=9", "train.batch_size=16", "loader=workers"]
    stream += ["loader.streams=4"]
    train(tmp_path, *stream, "train.eval_steps=1", f"task.metrics={{seen: {{_target_: {HERE}.Seen}}}}")
    tests = [line for line in metrics(tmp_path) if "test_accuracy" in line]
    assert [(line["step"], line["epoch"]) for line in tests] == [(9, 1), (18, 2)], "203 samples are a pass of 16 steps"
    assert [line["test_seen"] for line in tests] == [13.0] * 2, "the first batch, of the first of four streams"


class Seen:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.count = 0

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.count += len(labels)

    def compute(self) -> int:
        return self.count


class Sums:
    """Sequences of several lengths, and their sums."""

    def __init__(self, train: bool, **_: Any) -> None: ...

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        numbers = torch.from_numpy(np.random.default_rng(index).random(1 + index % 5, dtype=np.float32))
        return {"numbers": numbers, "label": numbers.sum()}


class Summing(nn.Module):
    """Takes padded sequences (B, longest)."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self.scale * numbers.sum(dim=1))[:, None]


def test_sequences_are_padded_and_their_sum_is_learnt(tmp_path):
    pad = ["task=regression", "task.inputs=numbers", "data.collate={_target_: data.collate.pad}", "train.epochs=20"]
    summary = train(tmp_path, f"{OWN}.Sums", f"model._target_={HERE}.Summing", *pad, "train.batch_size=16")
    assert summary["test_mae"] < 0.2 and summary["score"] == "test_mae" and summary["lower_is_better"]


class Batched(Images):
    """Has both ways to read."""

    def sample_spec(self) -> dict[str, Any]:
        return {"image": ((8, 8, 3), torch.uint8), "label": ((), torch.int64)}

    def read_batch(self, indices: Any, out: dict[str, torch.Tensor], random: Any) -> None:
        for row, index in enumerate(indices.tolist()):
            out["image"][row], out["label"][row] = Images.__getitem__(self, index)


class OwnReading(Batched):
    """Overrides `__getitem__` alone, so loaders ignore read_batch and sample_spec."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image[:4], label


class Half(nn.Sequential):
    """Takes images (3, 4, 8)."""

    def __init__(self, num_classes: int, **_: Any) -> None:
        super().__init__(nn.Flatten(), nn.Linear(4 * 8 * 3, num_classes))


def halves(samples: list[Any]) -> dict[str, Any]:
    images, labels = torch.utils.data.default_collate(samples)
    return {"image": images[:, :4].contiguous(), "label": labels}


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{OWN}.Batched"],
        [f"{OWN}.OwnReading", f"model._target_={HERE}.Half"],
        [f"data.collate={{_target_: {HERE}.halves}}", f"model._target_={HERE}.Half"],
    ],
)
def test_a_dataset_is_read_with_read_batch_unless_it_overrides_only_getitem_or_has_a_collate(tmp_path, overrides):
    assert train(tmp_path, *IMAGES, *overrides, "loader=workers")["test_accuracy"] == 1.0


class Late(Images):
    """Sample 37 has a mistake."""

    def __init__(self, train: bool, fault: str, **options: Any) -> None:
        super().__init__(train, **options)
        self.fault = fault

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        if index == 37 and self.fault == "missing":
            raise DataError("37.png is missing")
        return image, 2 if index == 37 and self.fault == "label" else label


@pytest.mark.parametrize("loader", [["loader=torch"], ["loader=workers", "loader.num_workers=1"], ["loader=threads"]])
def test_a_later_sample_that_cannot_be_read_ends_the_run_in_its_own_words(tmp_path, error, loader):
    with error(r"37\.png is missing"):
        train(tmp_path, *IMAGES, f"{OWN}.Late", "+data.fault=missing", *loader)
    if "loader=workers" in loader:
        train(tmp_path / "skips", *IMAGES, f"{OWN}.Late", "+data.fault=missing", *loader, "loader.on_error=skip")
        assert checkpoint(tmp_path / "skips")["step"] == 8


def test_a_run_is_the_same_in_every_way_but_speed_for_every_loader(tmp_path):
    for number, loader in enumerate(("torch", "workers", "threads", "resident")):
        train(tmp_path / str(number), LINEAR, f"loader={loader}", "train.max_steps=5")
    first, *others = (checkpoint(tmp_path / str(number))["model"]["1.weight"] for number in range(4))
    assert all(torch.equal(first, other) for other in others)
