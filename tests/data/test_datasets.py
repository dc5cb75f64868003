"""Every dataset of data/ keeps the promises of data/__init__.py, and its yaml has its arguments.

Of the public ones: the images that ship, their files' format, and what torchvision downloads.
"""

import gzip
import lzma
import pickle
from functools import partial
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import torch

from data import fashion
from data.cifar import CIFAR10
from data.fashion import TEST_FILES, TRAIN_FILES, FashionMini, FashionMNIST, read_idx
from data.image_folder import ImageFolder
from data.synthetic import COSTS, Synthetic
from tests.data.contract import ImageDataset, TransformedDataset
from tests.data.fakes import idx, noise, write_cifar, write_fashion, write_images
from tests.data.reading import refused

CONF = Path(__file__).parents[2] / "conf" / "data"


@pytest.fixture
def any_cifar(monkeypatch):
    """Switches off torchvision's checksums, so that it accepts the small files of fakes.py."""
    from torchvision.datasets import CIFAR10

    for attribute in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, attribute, [[name, None] for name, _ in getattr(CIFAR10, attribute)])
    monkeypatch.setitem(CIFAR10.meta, "md5", None)


class TestDatasets(TransformedDataset):
    @pytest.fixture(params=["fashion_mini", "fashion_mnist", "cifar10", "image_folder"])
    def make(self, request, tmp_path, any_cifar):
        """A function train, **arguments -> dataset."""
        self.yaml = CONF / f"{request.param}.yaml"
        makers = {
            "fashion_mini": lambda: FashionMini,
            "fashion_mnist": lambda: partial(FashionMNIST, root=write_fashion(tmp_path)),
            "cifar10": lambda: partial(CIFAR10, root=write_cifar(tmp_path)),
            "image_folder": lambda: partial(ImageFolder, root=write_images(tmp_path), image_size=32),
        }
        assert makers.keys() <= {path.stem for path in CONF.glob("*.yaml")}
        return makers[request.param]()


class TestSynthetic(ImageDataset):
    yaml = CONF / "synthetic.yaml"

    @pytest.fixture
    def make(self):
        return partial(Synthetic, length=30, test_length=20)


def test_the_embedded_images_are_balanced_and_small_and_mean_and_std_are_theirs():
    for train, per_class in ((True, 1000), (False, 200)):
        dataset = FashionMini(train=train, pad=0)
        assert np.bincount(dataset.labels).tolist() == [per_class] * 10
        assert dataset.images.mean() / 255 == pytest.approx(dataset.mean[0], abs=0.005)
        assert dataset.images.std() / 255 == pytest.approx(dataset.std[0], abs=0.005)
    assert sum(path.stat().st_size for path in fashion.EMBEDDED.iterdir()) <= 5_000_000


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_an_idx_file_is_read_and_one_that_is_truncated_or_of_another_format_refused(tmp_path, suffix, pack):
    array = noise(3, 4, 5)
    path = tmp_path / f"a{suffix}"
    content = pack(idx(array))
    path.write_bytes(content)
    assert np.array_equal(read_idx(path), array)
    other = b"<html>not found</html>", b"\0\0\x0d\x01\0\0\0\x01a", b"\0\0\x08\x01\0\0\0\x01ab", b"\0\0\x08\x7f"
    for spoiled in (*(content[:length] for length in range(len(content))), *map(pack, other)):
        path.write_bytes(spoiled)
        with refused(f"{path.name} .*good copy"):
            read_idx(path)


FASHION = FashionMNIST, [f"{name}.gz" for name in TRAIN_FILES + TEST_FILES], write_fashion, "FashionMNIST/raw", [13]
CIFAR = CIFAR10, ["cifar-10-python.tar.gz"], write_cifar, "", [3, 100, 200]


@pytest.mark.parametrize(("kind", "files", "write", "below", "pixel"), [FASHION, CIFAR])
def test_missing_files_are_downloaded_once_and_named_without_a_network(
    tmp_path, monkeypatch, any_cifar, kind, files, write, below, pixel
):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "downloads"
    download = Mock(side_effect=URLError("no network in tests"))
    for module in ("mnist", "cifar"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.download_and_extract_archive", download)
    with refused("no network in tests") as caught:
        kind(train=True)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert all(name in sentence for name in [*files, str(root)])
    download.side_effect = lambda *_, **__: write(root / below)
    kind(train=False)
    download.side_effect = AssertionError("the files are there")
    sample = kind(train=True, pad=0, transform=["crop"])[13]
    assert sample["label"].item() == 3 and sample["image"][5, 6].tolist() == pixel


def test_a_synthetic_sample_depends_only_on_seed_split_and_index_and_a_hundred_million_take_almost_no_memory():
    def image(index=5, train=True, seed=0):
        return Synthetic(train=train, seed=seed)[index]["image"]

    for other in (image(index=6), image(index=15), image(train=False), image(seed=1)):
        assert not torch.equal(image(), other)
    dataset = Synthetic(train=True, length=100_000_000, num_classes=1000)
    assert dataset[99_999_999]["label"].item() == 999 and len(pickle.dumps(dataset)) < 1_000_000


def test_a_synthetic_sample_spends_its_cost_once_and_a_cost_of_zero_never(monkeypatch):
    paid = []
    monkeypatch.setitem(COSTS, "wait", paid.append)
    Synthetic(train=True, cost="wait", cost_ms=0)[0]
    Synthetic(train=True, cost="wait", cost_ms=5)[0]
    assert paid == [0.005]
