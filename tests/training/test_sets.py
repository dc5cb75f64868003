"""Whole runs with datasets and networks as users write them: what trains, and what ends in a sentence."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from data.collate import pad
from data.errors import DataError
from data.samples import Samples
from tests.configs import NO_TRIALS, composed
from tests.test_train import metrics
from train import run
from training.checks import check_dataset
from training.config import ConfigError, checked
from training.datasets import Datasets, as_samples
from training.tasks import Classification

HERE = "test_sets"
MARGIN = "task.loss={_target_: torch.nn.MultiMarginLoss}"


class Plain:
    """As few lines as a dataset can have: (image, label), and nothing that describes them. `fault` is one mistake."""

    classes: tuple[str, ...] = ("dark", "light")

    def __init__(self, train: bool, fault: str = "", **attributes: object) -> None:
        self.train, self.fault = train, fault
        vars(self).update(attributes)
        if fault == "no classes":
            self.classes = ()
        if fault == "a class without test images" and not train:
            self.classes = ("light",)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        label, late = index % 2, index == 37
        image = torch.full((8, 8, 3), 200 * label, dtype=torch.uint8)
        if self.fault == "missing file" and late:
            raise FileNotFoundError("37.png is missing")
        images = {
            "floats": image.permute(2, 0, 1) / 255,
            "floats to 255": image.permute(2, 0, 1).float(),
            "another size": image[: 7 if late else 8],
            "another size in test": image[: 8 if self.train else 6],
        }
        labels = {"no label": None, "another label": 2 if late else label}
        return images.get(self.fault, image), labels.get(self.fault, label)


class Described(Plain):
    def sample_spec(self):
        return {"image": ((9, 9, 3), torch.uint8), "label": ((), torch.int64)}


class Sums:
    """Sequences of several lengths, and their sums."""

    def __init__(self, train: bool) -> None:
        pass

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        numbers = torch.from_numpy(np.random.default_rng(index).random(1 + index % 5, dtype=np.float32))
        return numbers, numbers.sum()


class Summing(nn.Module):
    """Takes padded sequences (B, longest)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self.scale * numbers.sum(dim=1))[:, None]


class Wide(nn.Sequential):
    def __init__(self, in_channels: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, 1000))


class Flat(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(8 * 8 * 3, 2))


def own(model: str) -> list[str]:
    return [f"model._target_={HERE}.{model}", "~model.size"]


def train(folder: Path, *overrides: str, dataset: str = "Plain") -> dict:
    small = ["model=linear", "train.batch_size=16", "train.epochs=2", *NO_TRIALS, "loader.num_workers=0"]
    config = composed(*small, *overrides)
    kept = {key: config.data[key] for key in ("val_fraction", "collate", "fault") if key in config.data}
    config.data = {"_target_": f"{HERE}.{dataset}", **kept}
    return run(config, folder)


@pytest.mark.parametrize("override", ["loader=torch", "loader=prefetch", "loader=resident", "+data.fault=floats"])
def test_a_dataset_of_tuples_of_uint8_or_float_images_trains_without_describing_them(tmp_path, override):
    assert train(tmp_path, override, "augment.erase=0.5")["test_accuracy"] == 1.0


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("no label", r"Plain\[0\] has None as 'label'"),
        ("another label", r"Plain\[37\] has 'label' 2: give 0 to 1"),
        ("another size", r"Plain\[\d+\] has 'image' of shape \(\d, 8, 3\), and Plain\[\d+\] of .*data\.collate"),
        ("missing file", r"Plain\[37\] raised FileNotFoundError: 37\.png is missing"),
    ],
)
@pytest.mark.parametrize(("loader", "workers"), [("torch", 0), ("torch", 1), ("workers", 1), ("threads", 1)])
def test_a_sample_that_cannot_be_used_ends_the_run_with_its_index(tmp_path, fault, sentence, loader, workers):
    with pytest.raises(DataError, match=sentence):
        train(tmp_path, f"+data.fault='{fault}'", f"loader={loader}", f"loader.num_workers={workers}")


def test_sequences_are_padded_and_their_sum_is_learnt(tmp_path):
    overrides = ["task=regression", "task.inputs=numbers", "+data.collate._target_=data.collate.pad"]
    summary = train(tmp_path, *overrides, *own("Summing"), "train.epochs=20", dataset="Sums")
    assert summary["test_mae"] < 0.2 and summary["score"] == "test_mae" and "test_accuracy" not in summary


def test_what_differs_in_two_dimensions_is_not_padded():
    tables = [{"numbers": torch.zeros(2, 3)}, {"numbers": torch.zeros(3, 2)}]
    with pytest.raises(DataError, match="'numbers' may differ in its first dimension only"):
        pad(tables)
    samples = Samples([(torch.zeros(2, 3), 0), (torch.zeros(3, 2), 0)], ["numbers", "label"], None)
    with pytest.raises(DataError, match=r"give all samples one shape$"):
        [samples[index] for index in range(2)]


def test_a_validation_split_chooses_the_best_checkpoint_and_the_test_set_is_evaluated_once(tmp_path):
    summary = train(tmp_path, "data.val_fraction=0.25")
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "val_accuracy" in line] == [3, 6]
    assert [line["step"] for line in lines if "test_accuracy" in line] == [6]
    assert summary["test_accuracy"] == 1.0 and {"val_accuracy", "val_loss", "test_loss"} <= summary.keys()


class Batched(Plain):
    """Has both ways to read; its read_batch may forget the images, or write other labels."""

    def sample_spec(self):
        return {"image": ((8, 8, 3), torch.uint8), "label": ((), torch.int64)}

    def read_batch(self, indices, out, random) -> None:
        for row, index in enumerate(indices.tolist()):
            image, label = self[index]
            if self.fault != "forgets images":
                out["image"][row] = image
            out["label"][row] = 0 if self.fault == "other labels" else label


class Undescribed(Plain):
    def read_batch(self, indices, out, random) -> None:
        pass


class OwnReading(Batched):
    """Overrides `__getitem__` alone, so loaders ignore read_batch and sample_spec."""

    def __getitem__(self, index: int):
        image, label = super().__getitem__(index)
        return image[:4], label


class Unread(torch.utils.data.Dataset):
    def __init__(self, train: bool) -> None:
        pass

    def __len__(self) -> int:
        return 64


class OnlyTraining(Plain):
    def __init__(self) -> None:
        super().__init__(train=True)


class Ragged(Sums):
    def __getitem__(self, index: int):
        return torch.zeros(1 + index), 0.0


class Endless:
    def __init__(self, train: bool) -> None:
        pass

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "overrides", "sentence"),
    [
        ("Described", [], r"Described\.sample_spec\(\) says that 'image' is torch\.uint8 \(9, 9, 3\), .* \(8, 8, 3\)"),
        ("Plain", ["+data.fault='no classes'"], "Plain has no `classes`"),
        ("Plain", own("Wide"), r"shape \(2, 1000\), and Classification needs a tensor \(2, 2\)"),
        ("Plain", ["+model.in_channels=4"], r"Sequential cannot take inputs of shape \(2, 3, 8, 8\) .*mat1 and mat2"),
        (
            "Plain",
            ["+data.fault='a class without test images'"],
            r"the test set has 1; .* is dark in the training set, and light in",
        ),
        ("Batched", ["+data.fault='forgets images'"], r"\.read_batch writes another 'image' for sample 0 than __geti"),
        ("Batched", ["+data.fault='other labels'"], r"Batched\.read_batch writes another 'label' for sample 63 than"),
        ("Undescribed", [], r"Undescribed has read_batch and no sample_spec"),
        ("Unread", [], r"Unread has no __getitem__"),
        (
            "Plain",
            ["+data.fault='another size in test'", *own("Flat")],
            r"cannot take inputs of shape \(2, 3, 6, 8\) \(first test",
        ),
        ("Plain", own("forgets_return"), r"forgets_return returned a NoneType: return the network"),
        ("Plain", ["task.loss={_target_: torch.nn.MSELoss}"], r"do not fit the loss or a score"),
        ("Plain", [f"task.loss={{_target_: {HERE}.number}}"], r"do not fit the loss or a score: 'float' object has"),
        ("Plain", [f"task.loss={{_target_: {HERE}.mistakes}}"], r"task\.loss has no gradient: compute it from"),
        ("Plain", ["task.label_smoothing=2"], r"do not fit the loss or a score: label_smoothing must be between"),
        ("Plain", ["task.class_weights=[1,2,3]"], r"class_weights=\[1, 2, 3\]: give balanced, or a number"),
        ("OnlyTraining", [], r"unexpected keyword argument 'train'"),
        ("Endless", [], r"Endless has no __len__: train\.py needs __len__ and __getitem__, or an IterableDataset"),
        ("Ragged", ["task=regression", "task.inputs=numbers"], r"Ragged\[1\] has .*shape \(2,\), and Ragged\[0\]"),
        ("Plain", ["+data.collate=data.collate.pad"], r"write 'data\.collate=\{_target_: data\.collate\.pad\}'"),
        ("Plain", ["+data.collate={_target_: data.collate.padd}"], r"data\.collate has no padd: did you mean pad\?$"),
        ("Plain", ["task.loss=torch.nn.HuberLoss"], r"write 'task\.loss=\{_target_: torch\.nn\.HuberLoss\}'"),
        ("Plain", ["task.metric=acuracy"], r"task\.metric=acuracy: did you mean accuracy\?"),
        ("Plain", ["augment.mixup=0.2", MARGIN], r"do not fit the loss or a"),
        ("Plain", [MARGIN, "task.class_weights=[1,2]"], r"leave out task\.loss"),
    ],
)
def test_what_cannot_train_ends_in_a_sentence_before_training(tmp_path, dataset, overrides, sentence):
    with pytest.raises((ConfigError, DataError), match=sentence) as error:
        train(tmp_path, *overrides, dataset=dataset)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dataset", ["Batched", "OwnReading"])
def test_a_dataset_is_read_with_read_batch_unless_it_overrides_only_getitem(tmp_path, dataset):
    assert train(tmp_path, dataset=dataset)["test_accuracy"] == 1.0
    given = {"Batched": Batched, "OwnReading": OwnReading}[dataset](train=True)
    checked_by_sample = isinstance(as_samples(given, Classification(given), False), Samples)
    assert checked_by_sample == (dataset == "OwnReading")


def halves(samples: list[dict]) -> dict:
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "image": batch["image"][:, :4].contiguous()}


class Half(Flat):
    """Takes images (3, 4, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self[1] = nn.Linear(4 * 8 * 3, 2)


@pytest.mark.parametrize("loader", ["torch", "prefetch"])
def test_a_collate_function_makes_the_batches_of_a_dataset_with_read_batch_too(tmp_path, loader):
    overrides = [f"+data.collate._target_={HERE}.halves", *own("Half")]
    summary = train(tmp_path, *overrides, f"loader={loader}", "loader.num_workers=1", dataset="Batched")
    assert summary["test_accuracy"] == 1.0


def datasets(**options: object) -> Datasets:
    config = composed("model=linear", "loader.num_workers=0")
    config.data = {"_target_": f"{HERE}.Plain", "val_fraction": 0.0, "collate": None, **options}
    return Datasets(checked(config))


@pytest.mark.parametrize(
    ("mean", "std", "sentence"),
    [
        ([120, 120, 120], [0.2] * 3, r"mean is \[120, 120, 120\]: give 3 numbers, one per channel, .* from 0 to 1"),
        ([0.5] * 3, [0.2, 0, 0.2], r"std is \[0\.2, 0, 0\.2\]: give 3 numbers"),
        (0.5, 0.25, r"Plain\.mean is 0\.5: give 3 numbers"),
        ([0.5] * 4, [0.2] * 4, r"mean is .*: give 3 numbers"),
    ],
)
def test_a_mean_or_std_that_does_not_fit_pixels_from_0_to_1_is_refused(mean, std, sentence):
    with pytest.raises(DataError, match=sentence):
        datasets(mean=mean, std=std)


def test_float_images_up_to_255_are_warned_of(caplog):
    datasets(fault="floats to 255")
    assert "images are float32 up to 200: divide them by 255" in caplog.text


def test_a_fork_may_check_its_dataset_in_a_test():
    batch = check_dataset(Batched(train=True), Classification(Plain), is_random=False)
    assert batch["image"].shape == (2, 8, 8, 3) and batch["label"].tolist() == [0, 1]
    with pytest.raises(DataError, match=r"Batched\.read_batch writes another 'image' for sample 0 than"):
        check_dataset(Batched(True, "forgets images"), Classification(Plain), is_random=False)


def forgets_return() -> None:
    nn.Linear(3, 2)


def number(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    return 0.5


def mistakes(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(dim=1) != labels).float()


def test_a_custom_score_may_be_a_function_and_choose_the_best_checkpoint(tmp_path):
    overrides = [f"task.scores={{sure: {{_target_: {HERE}.sure}}}}", "task.metric=sure"]
    summary = train(tmp_path, *overrides)
    assert summary["score"] == "test_sure" and 0.5 <= summary["test_sure"] <= 1


def sure(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.softmax(dim=1).amax(dim=1)
