"""Whole runs with datasets as users write them."""

from typing import Any

import pytest
import torch

from data.errors import DataError
from tests.configs import DOORS, LINEAR, SMALL, checkpoint, composed, metrics, train
from tests.training.doors import Images
from training.config import checked
from training.datasets import Datasets

HERE = __name__
IMAGES = [f"data._target_={DOORS}.Images", "train.batch_size=16", "data.length=64", LINEAR]


def test_a_validation_split_chooses_the_best_checkpoint_and_the_test_set_is_evaluated_once(tmp_path):
    summary = train(tmp_path, *IMAGES, "data.val_fraction=0.25")
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "val_accuracy" in line] == [3, 6]
    assert [line["step"] for line in lines if "test_accuracy" in line] == [6]
    assert summary["score"] == "val_accuracy" and {"test_accuracy", "val_loss"} <= summary.keys()


def test_an_evaluation_may_be_of_some_steps_only_and_a_stream_has_epochs_of_as_many_steps_as_it_is_told(tmp_path):
    stream = [f"data._target_={DOORS}.Stream", "train.steps_per_epoch=9", "train.batch_size=16", "loader=workers"]
    stream += ["loader.streams=4", f"task.scores={{seen: {{_target_: {HERE}.samples}}}}"]
    train(tmp_path, *stream, "train.eval_steps=1")
    tests = [line for line in metrics(tmp_path) if "test_accuracy" in line]
    assert [(line["step"], line["epoch"]) for line in tests] == [(9, 1), (18, 2)], "203 samples are a pass of 16 steps"
    assert [line["test_seen"] for line in tests] == [13.0] * 2, "the first batch, of the first of four streams"


def samples(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(len(labels)))


@pytest.mark.parametrize("loader", ["prefetch", "resident"])
def test_a_dataset_of_tuples_trains_with_any_loader(tmp_path, loader):
    assert train(tmp_path, *IMAGES, f"loader={loader}", "augment.erase=0.5")["test_accuracy"] == 1.0


def test_images_are_normalised_by_the_mean_and_std_of_their_dataset():
    batch = {"image": torch.full((1, 8, 8, 3), 102, dtype=torch.uint8), "label": torch.tensor([0])}
    image = Datasets(checked(composed(*SMALL))).transform(batch)["image"]
    torch.testing.assert_close(image.float(), torch.full((1, 3, 8, 8), (102 / 255 - 0.5) / 0.2), rtol=0.01, atol=0)


class Late(Images):
    """Sample 37 cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 37:
            raise DataError("37.png is missing")
        return super().__getitem__(index)


@pytest.mark.parametrize("loader", ["torch", "workers", "threads"])
def test_a_later_sample_that_cannot_be_read_ends_the_run_in_its_own_words(tmp_path, error, loader):
    late = [*IMAGES, f"data._target_={HERE}.Late", f"loader={loader}", "loader.num_workers=1"]
    with error(r"37\.png is missing"):
        train(tmp_path, *late)
    if loader == "workers":
        train(tmp_path / "skips", *late, "loader.on_error=skip")
        assert checkpoint(tmp_path / "skips")["step"] == 8
