"""data.mean and data.std: by what uint8 images are normalised, which a checkpoint keeps."""

from contextlib import nullcontext
from inspect import Parameter, Signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from data.array_dataset import ArrayDataset
from data.errors import DataError
from tests.configs import MIXTURE, checkpoint, train
from tests.data.fakes import noise
from tests.data.reading import refused
from tests.infrastructure.forks import ROOT
from training.datasets import ANY_DATA
from training.preprocessing import Preprocessing

HERE = __name__


class Tinted(ArrayDataset):
    """40 images in three uneven channels, not augmented. Its own mean is another one."""

    def __init__(self, train, brightness=2, **_):
        images = noise(40, 8, 8, 3) // np.array([1, 2, 4], np.uint8) // brightness
        about = {"classes": "ab", "mean": [0.1] * 3, "std": [0.2] * 3, "transform": ["center_crop"]}
        super().__init__(images, np.arange(40) % 2, train=train, **about)

    @property
    def moments(self):
        pixels = self.images / 255
        return pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))


class Stream(IterableDataset):
    """The images of Tinted, shared out to the workers."""

    classes = ("a", "b")

    def __init__(self, train, **_):
        self.images = Tinted(train)

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from (self.images[index] for index in range(first, len(self.images), step))


class Views(Tinted):
    """Two images in one field, or as a video."""

    def __init__(self, train, form, **_):
        super().__init__(train)
        self.form = form

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        image = sample["image"]
        forms = {
            "pair": (image, image),
            "dict": {"left": image},
            "video": torch.stack([image, image]),
            "floats": image / 255,
        }
        return {"image": forms[self.form], "label": sample["label"]}


class OfViews(torch.nn.Linear):
    def __init__(self, num_classes, **_):
        super().__init__(8 * 8 * 3, num_classes)

    def forward(self, images):
        while not isinstance(images, torch.Tensor):
            images = next(iter(images.values() if isinstance(images, dict) else images))
        return super().forward(images.float().flatten(1)[:, :192])


class Grey(Tinted):
    def __init__(self, train, **_):
        super().__init__(train)
        self.mean = (0.5,)


class Damaged(Tinted):
    def __getitem__(self, index):
        if index % 4 == 3:
            raise DataError(f"{index} is damaged")
        return super().__getitem__(index)


DATA = f"data._target_={HERE}.Tinted train.batch_size=16 train.epochs=1"


def normalization(folder):
    saved = checkpoint(folder)["new_images"]
    return saved["mean"], saved["std"]


@pytest.mark.parametrize("workers", [0, 1])
def test_auto_measures_the_training_images_and_a_set_value_stays(tmp_path, workers, monkeypatch):
    mean, std = Tinted(True).moments
    measured = normalization_of(tmp_path / "a", "data.mean=auto", "data.std=auto", f"loader.num_workers={workers}")
    assert measured == (pytest.approx(mean), pytest.approx(std))
    kept = normalization_of(tmp_path / "b", "data.mean=auto", "data.std=[0.3,0.3,0.3]")
    assert kept == (measured[0], (0.3, 0.3, 0.3))
    monkeypatch.setattr("training.preprocessing.MEASURED", 20)
    fewer = normalization_of(tmp_path / "c", "data.mean=auto", f"loader.num_workers={workers}")
    assert fewer != measured and fewer == normalization_of(tmp_path / "d", "data.mean=auto"), "the seed chooses them"
    assert fewer != normalization_of(tmp_path / "e", "data.mean=auto", "seed=1")


def normalization_of(folder, *settings):
    train(folder, DATA, *settings)
    return normalization(folder)


def test_auto_reads_streams_and_leaves_out_what_training_leaves_out(tmp_path):
    mean, _ = Tinted(True).moments
    stream = (
        f"{DATA} data._target_={HERE}.Stream train.steps_per_epoch=2 train.batch_size=4 loader=workers data.mean=auto"
    )
    train(tmp_path / "stream", stream)
    assert normalization(tmp_path / "stream")[0] == pytest.approx(mean)
    train(tmp_path / "skip", f"{DATA} data._target_={HERE}.Damaged loader=workers loader.on_error=skip data.mean=auto")
    pixels = Tinted(True).images[np.arange(40) % 4 != 3] / 255
    assert normalization(tmp_path / "skip")[0] == pytest.approx(pixels.mean((0, 1, 2)))


def test_a_resume_keeps_the_mean_and_std_of_its_checkpoint_unless_they_are_set(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    measured = normalization_of(tmp_path, "data.mean=auto", "data.std=auto")
    monkeypatch.setattr("training.datasets.mean_and_std", None)  # it would fail
    other = [DATA, "+data.brightness=1", "data.mean=auto", "data.std=auto"]
    train(tmp_path, *other, "train.epochs=2")
    assert "measures nothing anew" in caplog.text and f"{measured[0][0]}" in caplog.text
    caplog.clear()
    assert normalization(tmp_path) == measured
    train(tmp_path, *other[:2], "train.epochs=3")  # null
    assert "measures nothing anew" not in caplog.text
    assert normalization(tmp_path) == measured
    train(tmp_path, *other[:2], "data.mean=[0,0,0]", "train.epochs=4")
    assert normalization(tmp_path) == ((0, 0, 0), measured[1])


def test_a_mean_of_the_dataset_for_other_channels_is_named(tmp_path):
    with refused("Grey.mean has 1 numbers, and the images have 3 channels"):
        train(tmp_path, DATA, f"data._target_={HERE}.Grey")


@given(st.lists(st.floats(-1, 1) | st.integers(0, 1), min_size=3, max_size=3), st.booleans())
def test_a_std_that_is_not_above_0_is_refused_by_its_name(std, is_set):
    dataset = SimpleNamespace() if is_set else SimpleNamespace(std=std)
    preprocessing = Preprocessing({"std": std} if is_set else {}, {"_target_": "torch.nn.Linear"}, None)
    is_refused = refused(r"^data\.std=" if is_set else r"^SimpleNamespace\.std=") if min(std) <= 0 else nullcontext()
    with is_refused:
        normalize = preprocessing.normalize(dataset, ["image"], 3, dict)
        assert normalize.std == tuple(std)


def test_without_values_the_datasets_are_used_also_by_a_checkpoint_of_an_earlier_version(tmp_path):
    assert normalization_of(tmp_path / "run") == ((0.1,) * 3, (0.2,) * 3)
    state = checkpoint(tmp_path / "run")
    del state["new_images"]
    torch.save(state, tmp_path / "earlier.pt")
    train(tmp_path / "new", DATA, f"train.resume={tmp_path}/earlier.pt", "train.epochs=2")
    assert normalization(tmp_path / "new") == ((0.1,) * 3, (0.2,) * 3)


def test_a_mixture_has_the_values_of_its_first_part_or_measured_ones(tmp_path, caplog):
    parts = [MIXTURE, "train.epochs=1"]
    train(tmp_path / "first", *parts)
    assert normalization(tmp_path / "first") == ((0.5,) * 3, (0.2,) * 3)
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "nothing is to be warned of"
    train(tmp_path / "auto", *parts, "data.mean=auto")
    assert normalization(tmp_path / "auto")[0] == pytest.approx((0.5,) * 3, abs=0.05)


def test_the_keys_of_any_dataset_are_those_of_their_file():
    assert set(ANY_DATA) == yaml.safe_load((ROOT / "conf" / "any_data.yaml").read_text()).keys()


@pytest.mark.parametrize("key", ANY_DATA)
def test_a_parameter_of_the_name_of_a_key_of_any_dataset_is_warned_of_once(tmp_path, caplog, monkeypatch, key):
    value = {"fold": "1", "streaming": "false"}.get(key, "null")
    parameter = Parameter(key, Parameter.KEYWORD_ONLY, default=None)
    signature = Signature([parameter, Parameter("others", Parameter.VAR_KEYWORD)])
    monkeypatch.setattr(Tinted, "__signature__", signature, raising=False)
    with refused("give at least 2 folds") if key == "fold" else nullcontext():
        train(tmp_path, f"data._target_={HERE}.Tinted data.{key}={value} train.batch_size=16 train.epochs=1")
    assert sum(f"has a parameter {key}, which does not get data.{key}" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("form", ["pair", "dict", "video", "floats"])
def test_uint8_images_that_are_not_normalised_are_warned_of(tmp_path, caplog, form):
    views = f"data._target_={HERE}.Views +data.form={form} model._target_={HERE}.OfViews train.epochs=1"
    train(tmp_path, views)
    assert ("as they are, 0 to 255" in caplog.text) == (form != "floats")
