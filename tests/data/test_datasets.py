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


class TestDatasets(ImageDataset):
    @pytest.fixture(params=["fashion_mini", "fashion_mnist", "cifar10", "image_folder", "synthetic"])
    def make(self, request, tmp_path, any_cifar):
        """A function train, **arguments -> dataset."""
        self.yaml = CONF / f"{request.param}.yaml"
        makers = {
            "fashion_mini": lambda: FashionMini,
            "fashion_mnist": lambda: partial(FashionMNIST, root=write_fashion(tmp_path)),
            "cifar10": lambda: partial(CIFAR10, root=write_cifar(tmp_path)),
            "image_folder": lambda: partial(ImageFolder, root=write_images(tmp_path), image_size=32),
            "synthetic": lambda: partial(Synthetic, length=30, test_length=20),
        }
        assert makers.keys() <= {path.stem for path in CONF.glob("*.yaml")}
        return makers[request.param]()
