"""What cannot work is refused in a sentence that has the value and the remedy."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from data.batch_transform import Normalize
from data.fashion import EMBEDDED, FashionMini
from data.image_folder import ImageFolder
from data.image_table import ImageTable
from data.synthetic import Synthetic
from tests.data.fakes import arrays, flip_a_byte, write_images
from tests.data.reading import refused


def normalize(**batch):
    return Normalize([0.5] * 3, [0.5] * 3)(batch, None)


def resident(**settings):
    return arrays(**settings).augment_batch({}, None)


@pytest.mark.parametrize(
    ("make", "arguments", "sentence"),
    [
        (arrays, {"images": np.zeros((2, 5, 4, 3))}, "uint8 of shape"),
        (arrays, {"images": np.zeros((2, 5), np.uint8)}, "uint8 of shape"),
        (arrays, {"labels": np.array([1])}, "labels of shape (20,)"),
        (arrays, {"labels": np.zeros(20)}, "labels of shape (20,), integers, not float64 (20,)"),
        (arrays, {"pad": 10}, "data.pad=10"),
        (arrays, {"transform": "v2"}, "data.transform=v2"),
        (arrays, {"test_transform": [Path]}, "data.test_transform="),
        (arrays, {"transform": None}, "data.transform=None"),
        (arrays, {"transform": ["crop", "trival"]}, "data.transform=trival"),
        (arrays, {"policy": "trivial"}, "data.policy=trivial: "),
        (arrays, {"flip": False}, "data.flip=False: "),
        (arrays, {"transform_input": "array"}, "data.transform_input=array: "),
        (arrays, {"transform_after": "crop"}, "data.transform_after=crop: "),
        (resident, {"transform": ["crop", "rand"]}, "data.transform"),
        (normalize, {"image": torch.zeros(2, 4, 4, 3)}, "uint8 images of shape (B, H, W, 3)"),
        (Synthetic, {"cost_ms": -1}, "data.cost_ms=-1"),
        (Synthetic, {"length": 1e8}, "data.length=100000000.0"),
        (Synthetic, {"cost": "nativ"}, "data.cost=nativ"),
        (ImageFolder, {}, "data.root"),
        (ImageFolder, {"image_size": "large"}, "data.image_size=large"),
        (ImageFolder, {"min_area": 0}, "data.min_area=0"),
        (ImageFolder, {"decoder": "jpeg"}, "data.decoder=jpeg"),
        (ImageTable, {}, "data.table is not set"),
        (ImageTable, {"table": 3}, "3 cannot be used as a path"),
        (ImageTable, {"table": "."}, f"{Path.cwd()} cannot be read"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_key(make, arguments, sentence):
    first = [True] if make in (Synthetic, ImageFolder, ImageTable) else []
    with refused(re.escape(sentence)):
        make(*first, **arguments)


@pytest.mark.parametrize(
    ("spoil", "train", "sentence"),
    [
        (shutil.rmtree, True, "ROOT is not a folder"),
        (lambda root: [shutil.rmtree(folder) for folder in root.glob("train/*")], True, "no class folders"),
        (lambda root: (root / "train" / "owl").mkdir(), True, "ROOT/train/owl has no images"),
        (lambda root: (root / "val" / "owl").mkdir(), False, "ROOT/val/owl is a class that ROOT/train does not have"),
    ],
)
def test_a_wrong_folder_is_named(tmp_path, spoil, train, sentence):
    root = write_images(tmp_path / "images")
    spoil(root)
    with refused(sentence.replace("ROOT", re.escape(str(root)))):
        ImageFolder(train=train, root=root)


@pytest.mark.parametrize("spoil", [flip_a_byte, Path.unlink])
def test_a_damaged_or_missing_file_of_the_shipped_images_is_named_with_the_way_to_restore_it(tmp_path, spoil):
    folder = shutil.copytree(EMBEDDED, tmp_path / "embedded")
    spoil(folder / "train-images-idx3-ubyte.xz")
    with refused(r"train-images-idx3-ubyte.xz .*git checkout -- data/embedded"):
        FashionMini(train=True, root=folder)
