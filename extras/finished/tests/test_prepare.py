"""What predict.py and export.py do to a new image: what the dataset's `prepare` does, or they refuse."""

import csv
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.subset import Subset
from data.synthetic import Synthetic
from scripts import export, predict
from tests.configs import NO_TRIALS, composed
from train import run
from training.config import ConfigError
from training.data_spec import stored
from training.finished.prepare import Prepare

HERE = "test_prepare"
SMALL = ("data=synthetic", "data.length=32", "data.test_length=12", "data.image_size=16", "train.batch_size=16")


class Cropping(Synthetic):
    """A fork's dataset that crops in `__getitem__`, and inherits a `prepare` that does not."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "image": sample["image"][4:12, 4:12]}

    def sample_spec(self):
        return {"image": ((8, 8, 3), torch.uint8), "label": ((), torch.int64)}


class Prepared(Synthetic):
    """The same images, cropped in `prepare`, which Synthetic's `__getitem__` calls."""

    margin = 2  # a default, which the constructor replaces
    read_batch = None

    def __init__(self, train, **images):
        super().__init__(train, **images)
        self.margin = 4

    def prepare(self, image):
        return image[self.margin : -self.margin, self.margin : -self.margin]

    def sample_spec(self):
        return {"image": ((8, 8, 3), torch.uint8), "label": ((), torch.int64)}


class Unprepared:
    classes = ("a", "b")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.zeros((8, 8, 3), np.uint8), index % 2


class Weighted(Unprepared):
    """Its `prepare` needs something that a checkpoint does not store."""

    weights = None

    def __init__(self, train=False):
        self.weights = np.ones(3)

    def __getitem__(self, index):
        return self.prepare(np.zeros((8, 8, 3), np.uint8)), index % 2

    def prepare(self, image):
        return image if getattr(self, "weights", None) is None else (image * self.weights).astype(np.uint8)


def half(train, **images):
    """A function that returns torch's Subset of a dataset."""
    part = torch.utils.data.Subset(Prepared(train, **images), range(8, 0, -1) if not train else range(32))
    part.classes = part.dataset.classes
    return part


def trained(folder, target):
    config = composed(*SMALL, "model=linear", "train.epochs=1", *NO_TRIALS, "loader.num_workers=0")
    config.data._target_ = f"{HERE}.{target}"
    run(config, folder)
    return folder


@pytest.fixture
def photos(tmp_path):
    """The 12 test images as files of 16x16 pixels."""
    images = Synthetic(False, test_length=12, image_size=16)
    (tmp_path / "photos").mkdir()
    for number in range(12):
        Image.fromarray(images[number]["image"].numpy()).save(tmp_path / "photos" / f"{number:02}.png")
    return tmp_path / "photos"


def predicted(folder, out, *inputs):
    out.mkdir()
    predict.main([str(folder), *inputs, "loader.num_workers=0", "--trust", HERE, "--out", str(out / "p.csv")])
    with (out / "p.csv").open(newline="") as file:
        return [row[1:] for row in csv.reader(file)][1:]


@pytest.mark.parametrize("target", ["Prepared", "half"])
def test_files_of_the_test_images_get_the_predictions_of_the_test_images(tmp_path, photos, target):
    folder = trained(tmp_path / "run", target)
    of_dataset = predicted(folder, tmp_path / "dataset")
    files = [f"{photos}/{number:02}.png" for number in (range(12) if target == "Prepared" else range(8, 0, -1))]
    assert predicted(folder, tmp_path / "files", *files) == of_dataset and len(of_dataset) == len(files)


def test_a_fork_that_crops_without_prepare_is_refused_by_predict_and_export(tmp_path, photos):
    folder = trained(tmp_path / "run", "Cropping")
    sentence = r"^Cropping has its own __getitem__, and inherits prepare\(image\), .*: define prepare in Cropping too"
    with pytest.raises(ConfigError, match=sentence):
        predicted(folder, tmp_path / "files", str(photos))
    with pytest.raises(ConfigError, match=sentence):
        export.main([str(folder), "loader.num_workers=0", "--trust", HERE])
    assert not (folder / "export").exists()
    assert len(predicted(folder, tmp_path / "dataset")) == 12  # its own test images need no prepare


def test_the_exports_readme_has_the_code_of_prepare_and_its_settings(tmp_path):
    folder = trained(tmp_path / "run", "Prepared")
    export.main([str(folder), "loader.num_workers=0", "--trust", HERE])
    readme = (folder / "export" / "README.md").read_text()
    assert "test_prepare.Prepared.prepare does (its code is below; margin=4), which makes it uint8 (8, 8, 3)" in readme
    assert "def prepare(self, image):\n    return image[self.margin" in readme
    assert "aspect ratio" not in readme and "Pillow" not in readme


def test_a_dataset_without_prepare_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"^Unprepared has no prepare\(image\), so .*: add this method, and call it"):
        Prepare(stored(Unprepared()))


def test_prepare_is_called_without_the_data_and_in_other_processes():
    dataset = Prepared(False, test_length=9, image_size=16)
    prepare = pickle.loads(pickle.dumps(Prepare(stored(Subset(dataset, np.arange(3))))))
    image = np.random.default_rng(0).integers(256, size=(20, 30, 3), dtype=np.uint8)
    assert np.array_equal(prepare(image), image[4:-4, 4:-4])
    assert not any(isinstance(value, np.ndarray) for value in stored(dataset)["attributes"].values())


def test_an_attribute_that_is_not_stored_is_not_replaced_by_the_default_of_the_class():
    with pytest.raises(DataError, match=r"^Weighted\.prepare uses the attribute weights, which a checkpoint does not"):
        Prepare(stored(Weighted()))(np.ones((8, 8, 3), np.uint8))


def test_only_numbers_texts_and_short_lists_are_stored():
    dataset = Unprepared()
    dataset.__dict__ |= {"files": ["a"] * 101, "mean": (0.5, 0.5), "download": True, "root": np.float64(1), "d": {}}
    assert stored(dataset) == {
        "_target_": "test_prepare.Unprepared",
        "attributes": {"mean": (0.5, 0.5), "download": True},
        "others": ["files", "root", "d"],
    }


def test_a_checkpoint_cannot_have_foreign_code_prepare_its_images(tmp_path):
    folder = trained(tmp_path / "run", "Prepared")
    path = (folder / "checkpoints" / "best.pt").resolve()
    state = torch.load(path, weights_only=True)
    state["data_spec"]["dataset"]["_target_"] = "os.system"
    torch.save(state, path)
    with pytest.raises(ConfigError, match=r"data\._target_=os\.system is not in this repository's"):
        predicted(folder, tmp_path / "files", "a.png")
