import math
import pickle
import re

import numpy as np
import pytest
import torch
from PIL import Image
from reading import read_batch

from data.errors import DataError
from data.image_folder import ImageFolder
from data.packed import Packed
from loaders import WorkerLoader


def whole(size):
    return 0, 0, *size


@pytest.fixture
def photographs(tmp_path):
    """Images of several sizes and formats, some larger and some smaller than those of a pack."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for number, (width, height) in enumerate([(60, 40), (30, 90), (20, 20), (41, 300)]):
            folder = tmp_path / "images" / split / f"class {number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            noise = Image.fromarray(generator.integers(256, size=(8, 8, 3), dtype=np.uint8)).resize((width, height))
            noise.save(folder / f"{number}.{'png' if number == 3 else 'jpg'}")
    return tmp_path


@pytest.mark.parametrize("train", [True, False])
def test_a_pack_of_unchanged_files_gives_the_same_batches_as_the_folder(photographs, write_pack, train):
    folder = ImageFolder(train, photographs / "images", image_size=24)
    pack = Packed(train, write_pack(photographs, "--format", "jpeg"), image_size=24)
    assert (pack.classes, pack.labels.tolist()) == (folder.classes, folder.labels.tolist())
    ours, theirs = read_batch(pack, 4), read_batch(folder, 4)
    assert all(torch.equal(field, theirs[name]) for name, field in ours.items())


def test_raw_images_are_the_files_resized_once(photographs, write_pack):
    folder = ImageFolder(True, photographs / "images")
    pack = Packed(True, write_pack(photographs, "--short-side", "32"))
    for index in range(4):
        original, packed = (data.read(index, whole, math.inf) for data in (folder, pack))
        sides = original.shape[1:]
        if min(sides) > 32:
            sides = tuple(side * 32 // min(sides) for side in sides)
            expected = torch.nn.functional.interpolate(original[None], sides, mode="bilinear", antialias=True)[0]
        else:
            expected = original
        assert packed.shape == (3, *sides)
        assert (packed.int() - expected).abs().max() <= 1
        part = pack.read(index, lambda size: (2, 3, 12, 15), math.inf)
        assert torch.equal(part, packed[:, 3:15, 2:12])


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_workers_read_a_pack_and_its_pickle_has_no_images(photographs, write_pack, form):
    pack = Packed(True, write_pack(photographs, "--format", form), image_size=24)
    expected = read_batch(pack, 4)
    with WorkerLoader(pack, 4, seed=0, num_workers=1, shuffle=False) as loader:
        (batch,) = loader
    assert batch["label"].tolist() == pack.labels.tolist()
    assert torch.equal(batch["image"], expected["image"])
    assert (pack.folder / "train-00000.bin").read_bytes()[:100] not in pickle.dumps(pack)


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda pack: (pack / "pack.json").unlink(), "PACK is not a pack: it has no pack.json; make one with"),
        (
            lambda pack: (pack / "pack.json").rename(pack / "unfinished.json"),
            "PACK is an unfinished pack; run the command",
        ),
        (lambda pack: (pack / "pack.json").write_text("{"), "PACK/pack.json is damaged"),
        (lambda pack: (pack / "pack.json").write_text("[]"), "PACK/pack.json is damaged .it does not have version 1"),
        (lambda pack: (pack / "pack.json").write_text('{"version": 1}'), "pack.json is damaged .it has no bytes"),
        (lambda pack: (pack / "train.npy").unlink(), "PACK/train.npy is damaged .No such file"),
        (lambda pack: flip_a_byte(pack / "train.npy"), "PACK/train.npy is damaged .its checksum is wrong"),
        (lambda pack: (pack / "train-00000.bin").unlink(), "PACK/train-00000.bin is damaged .No such file"),
        (
            lambda pack: (pack / "train-00000.bin").write_bytes(b"1"),
            "train-00000.bin is damaged .it has 1 bytes instead",
        ),
    ],
)
def test_an_incomplete_or_damaged_pack_is_refused_with_the_file(tmp_path, write_pack, spoil, words):
    pack = write_pack(tmp_path)
    spoil(pack)
    with pytest.raises(DataError, match=words.replace("PACK", re.escape(str(pack)))):
        Packed(True, pack)


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_an_image_that_was_changed_is_named_when_it_is_read(tmp_path, write_pack, form):
    folder = write_pack(tmp_path, "--format", form)
    pack, shard = Packed(True, folder), folder / "train-00000.bin"
    pack[0]  # maps the shard
    flip_a_byte(shard)
    bad = re.escape(f"{shard} is damaged (the checksum of cat/1.jpg is wrong)")
    with pytest.raises(DataError, match=bad):
        Packed(True, folder)[1]
    with pytest.raises(DataError, match=bad):
        read_batch(Packed(True, folder), 3)
    assert Packed(True, folder)[3]["label"] == 1  # the other images can still be read


def test_a_shard_that_was_deleted_is_named_when_it_is_read(tmp_path, write_pack):
    pack = Packed(True, write_pack(tmp_path))
    (tmp_path / "pack" / "train-00000.bin").unlink()
    with pytest.raises(DataError, match=r"train-00000.bin is damaged .*No such file"):
        pack[0]


def test_without_a_root_the_error_says_how_to_make_a_pack():
    with pytest.raises(DataError, match=r"data.root is not set.*scripts/pack_images.py"):
        Packed(True)


def test_an_image_that_was_damaged_before_packing_is_named(tmp_path, write_pack):
    """Its checksum is correct, so the decoder finds it."""
    dataset = Packed(True, write_pack(tmp_path, "--format", "jpeg"))
    dataset._entries["bytes"][0] = 100  # cut short
    dataset._verified[0] = True
    with pytest.raises(DataError, match=r"cat/0.jpg in .* cannot be read as an image \(.*\); make a new pack"):
        dataset[0]
