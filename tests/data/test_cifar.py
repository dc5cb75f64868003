import pytest
from fakes import write_cifar

from data.cifar import CIFAR10
from data.errors import DataError


def test_existing_files_are_read_without_a_download(tmp_path, no_network, any_cifar):
    root = write_cifar(tmp_path)
    dataset = CIFAR10(train=True, root=str(root), pad=0, flip=False)
    assert len(dataset) == 50 and len(CIFAR10(train=False, root=root)) == 10
    assert dataset[13]["image"][5, 6].tolist() == [3, 100, 200] and dataset[13]["label"].item() == 3
    assert dataset.classes[3] == "name 3"


def test_missing_files_are_downloaded_by_torchvision(tmp_path, monkeypatch, any_cifar):
    def unpack(url, root, filename, md5):
        write_cifar(root)

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", unpack)
    assert len(CIFAR10(train=False, root=tmp_path / "new")) == 10


def test_without_a_network_the_file_and_its_folder_are_named(tmp_path, no_network):
    with pytest.raises(DataError, match=r"no network in tests.*cifar-10-python\.tar\.gz") as caught:
        CIFAR10(train=True, root=tmp_path)
    assert str(tmp_path) in str(caught.value)
