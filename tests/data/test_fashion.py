import gzip
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest

from data import fashion
from data.errors import DataError
from data.fashion import FashionMini, FashionMNIST, read_idx


@pytest.fixture
def embedded(tmp_path, monkeypatch):
    """A copy of data/embedded/ for tests that damage it."""
    monkeypatch.setattr(fashion, "EMBEDDED", shutil.copytree(fashion.EMBEDDED, tmp_path / "embedded"))
    return fashion.EMBEDDED


def test_the_embedded_images_are_balanced_and_small():
    for train, per_class in ((True, 1000), (False, 200)):
        dataset = FashionMini(train=train)
        assert np.bincount(dataset.labels).tolist() == [per_class] * 10
        assert dataset.sample_spec()["image"][0] == (28, 28, 1)
    assert sum(path.stat().st_size for path in fashion.EMBEDDED.iterdir()) <= 5_000_000


def test_mean_and_std_are_those_of_the_images():
    dataset = FashionMini(train=True, pad=0)
    assert dataset.images.mean() / 255 == pytest.approx(dataset.mean[0], abs=0.005)
    assert dataset.images.std() / 255 == pytest.approx(dataset.std[0], abs=0.005)


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("train-images-idx3-ubyte.xz", flip_a_byte, "SHA-256.*git checkout.*make_fashion_mini"),
        ("train-labels-idx1-ubyte.xz", Path.unlink, "git checkout"),
        ("SHA256SUMS", Path.unlink, "git checkout"),
    ],
)
def test_a_damaged_or_missing_file_is_named_with_the_way_to_restore_it(embedded, name, spoil, words):
    spoil(embedded / name)
    with pytest.raises(DataError, match=f"{name}.*{words}"):
        FashionMini(train=True)
    with pytest.raises(DataError, match=r"leave out data\.root"):
        FashionMini(train=True, root=embedded / "nonexistent")


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("place", [".", "FashionMNIST/raw"])
def test_existing_files_are_read_without_a_download(tmp_path, no_network, place, suffix, write_fashion):
    write_fashion(tmp_path / place, suffix)
    dataset = FashionMNIST(train=True, root=str(tmp_path), pad=0, flip=False)
    assert len(dataset) == 20
    assert dataset[13]["image"].unique().tolist() == [13] and dataset[13]["label"].item() == 3
    assert len(FashionMNIST(train=False, root=str(tmp_path))) == 20


def test_missing_files_are_downloaded_by_torchvision(tmp_path, monkeypatch, write_fashion):
    source = write_fashion(tmp_path / "web")

    def unpack(url, download_root, filename, md5):
        shutil.copy(source / filename.removesuffix(".gz"), download_root)

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", unpack)
    assert len(FashionMNIST(train=True, root=tmp_path / "new")) == 20


def test_without_a_network_the_four_files_and_their_folder_are_named(tmp_path, no_network, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no network in tests") as caught:
        FashionMNIST(train=True)
    sentence = str(caught.value)
    for name in fashion.TRAIN_FILES + fashion.TEST_FILES:
        assert f"{name}.gz" in sentence
    assert str(tmp_path / "downloads") in sentence and "\n" not in sentence


@pytest.mark.parametrize("name", ["a", "a.gz", "a.xz"])
def test_an_idx_file_is_read_correctly(tmp_path, name, write_idx):
    array = np.random.default_rng(0).integers(256, size=(3, 4, 5), dtype=np.uint8)
    write_idx(tmp_path / name, array)
    if name == "a.xz":
        (tmp_path / name).write_bytes(lzma.compress((tmp_path / name).read_bytes()))
    assert np.array_equal(read_idx(tmp_path / name), array)


def test_a_truncated_idx_file_or_one_of_another_format_is_refused(tmp_path, write_idx):
    path = tmp_path / "a.gz"
    write_idx(path, np.zeros((2, 3), np.uint8))
    content = path.read_bytes()
    other = b"<html>not found</html>", b"\0\0\x0d\x01\0\0\0\x01a", b"\0\0\x08\x01\0\0\0\x01ab"
    for spoiled in (*(content[:length] for length in range(len(content))), *map(gzip.compress, other)):
        path.write_bytes(spoiled)
        with pytest.raises(DataError, match=r"a\.gz .*good copy"):
            read_idx(path)
