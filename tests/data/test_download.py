"""The public datasets, which torchvision downloads if their files are not there."""

from unittest.mock import Mock
from urllib.error import URLError

import pytest

from data.cifar import CIFAR10
from data.errors import DataError
from data.fashion import TEST_FILES, TRAIN_FILES, FashionMNIST
from tests.data.fakes import write_cifar, write_fashion

FASHION = FashionMNIST, [f"{name}.gz" for name in TRAIN_FILES + TEST_FILES], write_fashion, "FashionMNIST/raw", [13]
CIFAR = CIFAR10, ["cifar-10-python.tar.gz"], write_cifar, "", [3, 100, 200]


@pytest.mark.parametrize(("kind", "files", "write", "below", "pixel"), [FASHION, CIFAR])
def test_missing_files_are_downloaded_once_and_named_without_a_network(
    tmp_path, monkeypatch, any_cifar, kind, files, write, below, pixel
):
    monkeypatch.chdir(tmp_path)
    root, download = tmp_path / "downloads", Mock(side_effect=URLError("no network in tests"))
    for module in ("mnist", "cifar"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.download_and_extract_archive", download)
    with pytest.raises(DataError, match="no network in tests") as caught:
        kind(train=True)
    assert all(name in str(caught.value) for name in [*files, str(root)]) and "\n" not in str(caught.value)
    download.side_effect = lambda *_, **__: write(root / below)
    kind(train=False)
    download.side_effect = AssertionError("the files are there")
    sample = kind(train=True, pad=0, flip=False)[13]
    assert sample["label"].item() == 3 and sample["image"][5, 6].tolist() == pixel
