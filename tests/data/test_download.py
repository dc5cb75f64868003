"""The public datasets, which torchvision downloads if their files are not there."""

import pytest

from data.cifar import CIFAR10
from data.errors import DataError
from data.fashion import TEST_FILES, TRAIN_FILES, FashionMNIST
from tests.data.fakes import write_cifar, write_fashion

FILES = {CIFAR10: ["cifar-10-python.tar.gz"], FashionMNIST: [f"{name}.gz" for name in TRAIN_FILES + TEST_FILES]}
pytestmark = [pytest.mark.usefixtures("any_cifar"), pytest.mark.parametrize("kind", FILES)]


def write(kind, root):
    return write_cifar(root) if kind is CIFAR10 else write_fashion(root / "FashionMNIST" / "raw")


def test_missing_files_are_downloaded_by_torchvision(tmp_path, monkeypatch, kind):
    root, downloads = tmp_path / "new", []

    def download(*_, **__):
        downloads.append(downloads or write(kind, root))  # the first of the four files brings all

    for module in ("mnist", "cifar"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.download_and_extract_archive", download)
    assert len(kind(False, root)) == (10 if kind is CIFAR10 else 20) and downloads


def test_existing_files_are_read_without_a_download(tmp_path, no_network, kind):
    write(kind, tmp_path)
    dataset = kind(train=True, root=str(tmp_path), pad=0, flip=False)
    assert len(dataset) == (50 if kind is CIFAR10 else 20) and dataset[13]["label"].item() == 3
    if kind is CIFAR10:
        assert dataset[13]["image"][5, 6].tolist() == [3, 100, 200] and dataset.classes[3] == "name 3"
    else:
        assert dataset[13]["image"].unique().tolist() == [13]


def test_without_a_network_the_files_and_their_folder_are_named(tmp_path, no_network, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no network in tests") as caught:
        kind(train=True)
    sentence = str(caught.value)
    assert all(name in sentence for name in [*FILES[kind], str(tmp_path / "downloads")]) and "\n" not in sentence
