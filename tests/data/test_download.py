"""The public datasets, which torchvision downloads if their files are not there."""

from urllib.error import URLError

import pytest

from data.cifar import CIFAR10
from data.errors import DataError
from data.fashion import TEST_FILES, TRAIN_FILES, FashionMNIST
from tests.data.fakes import write_cifar, write_fashion

FILES = {CIFAR10: ["cifar-10-python.tar.gz"], FashionMNIST: [f"{name}.gz" for name in TRAIN_FILES + TEST_FILES]}


@pytest.mark.parametrize("kind", FILES)
def test_missing_files_are_downloaded_once_and_named_without_a_network(tmp_path, monkeypatch, any_cifar, kind):
    root, online = tmp_path / "downloads", False

    def download(*_, **__):
        if not online:
            raise URLError("no network in tests")
        write_cifar(root) if kind is CIFAR10 else write_fashion(root / "FashionMNIST" / "raw")

    monkeypatch.chdir(tmp_path)
    for module in ("mnist", "cifar"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.download_and_extract_archive", download)
    with pytest.raises(DataError, match="no network in tests") as caught:
        kind(train=True)
    sentence = str(caught.value)
    assert all(name in sentence for name in [*FILES[kind], str(root)]) and "\n" not in sentence
    online = True
    assert len(kind(train=False)) == (10 if kind is CIFAR10 else 20)
    online = False
    dataset = kind(train=True, pad=0, flip=False)
    assert len(dataset) == (50 if kind is CIFAR10 else 20) and dataset[13]["label"].item() == 3
    if kind is CIFAR10:
        assert dataset[13]["image"][5, 6].tolist() == [3, 100, 200] and dataset.classes[3] == "name 3"
    else:
        assert dataset[13]["image"].unique().tolist() == [13]
