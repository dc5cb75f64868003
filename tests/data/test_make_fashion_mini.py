"""The script that makes data/embedded/, on a small fake of the full dataset."""

import hashlib
import sys

import pytest

from data.errors import DataError
from data.fashion import read_idx, verify_checksum
from scripts import make_fashion_mini


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_keeps_the_first_images_of_each_class_in_their_order(tmp_path, write_fashion):
    source = write_fashion(tmp_path / "full", ".gz", per_class=4)
    make_fashion_mini.make(source, tmp_path / "mini", train_per_class=3, test_per_class=1)
    for split, count in (("train", 30), ("t10k", 10)):
        images = read_idx(tmp_path / "mini" / f"{split}-images-idx3-ubyte.xz")
        labels = read_idx(tmp_path / "mini" / f"{split}-labels-idx1-ubyte.xz")
        assert images[:, 0, 0].tolist() == list(range(count))
        assert labels.tolist() == [i % 10 for i in range(count)]


def test_it_writes_the_same_bytes_each_time_and_their_checksums(tmp_path, write_fashion):
    source = write_fashion(tmp_path / "full")
    for name in ("one", "two"):
        make_fashion_mini.make(source, tmp_path / name, train_per_class=2, test_per_class=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    for line in (tmp_path / "one" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "one" / name).read_bytes()).hexdigest() == digest
        verify_checksum(tmp_path / "one" / name)


def test_a_source_that_is_not_the_full_dataset_is_refused_in_a_sentence(tmp_path, monkeypatch, write_fashion):
    with pytest.raises(DataError, match="T-shirt/top has 2 of 1000 images"):
        make_fashion_mini.make(write_fashion(tmp_path / "full"), tmp_path / "mini")
    monkeypatch.setattr(sys, "argv", ["make", "--source", str(tmp_path / "none"), "--target", str(tmp_path / "mini")])
    with pytest.raises(SystemExit, match=r"error: .*none does not have all of train-images.*--source"):
        make_fashion_mini.main()
