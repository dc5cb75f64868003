"""Every dataset of data/ keeps the promises of data/__init__.py, and its yaml has its arguments."""

from functools import partial
from pathlib import Path

import pytest

from data.cifar import CIFAR10
from data.fashion import FashionMini, FashionMNIST
from data.image_folder import ImageFolder
from data.synthetic import Synthetic
from tests.data.contract import ImageDataset
from tests.data.fakes import write_cifar, write_fashion, write_images

CONF = Path(__file__).parents[2] / "conf" / "data"


class TestFashionMini(ImageDataset):
    yaml = CONF / "fashion_mini.yaml"

    @pytest.fixture
    def make(self):
        return FashionMini


class TestFashionMNIST(ImageDataset):
    yaml = CONF / "fashion_mnist.yaml"

    @pytest.fixture
    def make(self, tmp_path):
        return partial(FashionMNIST, root=write_fashion(tmp_path))


class TestCIFAR10(ImageDataset):
    yaml = CONF / "cifar10.yaml"

    @pytest.fixture
    def make(self, tmp_path, any_cifar):
        return partial(CIFAR10, root=write_cifar(tmp_path))


class TestImageFolder(ImageDataset):
    yaml = CONF / "image_folder.yaml"

    @pytest.fixture
    def make(self, tmp_path):
        return partial(ImageFolder, root=write_images(tmp_path), image_size=32)


class TestSynthetic(ImageDataset):
    yaml = CONF / "synthetic.yaml"
    policies = (None,)

    @pytest.fixture
    def make(self):
        return partial(Synthetic, length=30, test_length=20)


def test_every_yaml_is_tested():
    tested = {kind.yaml for kind in ImageDataset.__subclasses__() if kind.__module__ == __name__}
    assert tested == set(CONF.glob("*.yaml"))
