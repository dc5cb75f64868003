"""What data=packed reads, and what pack_images.py writes: it may be interrupted at any time."""

import math
import pickle
import re
import shlex
import shutil
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from PIL import Image

from data.image_folder import ImageFolder
from extras.packed import pack_images
from extras.packed.packed import Packed
from tests.data.contract import TransformedDataset, assert_reads_as_the_folder
from tests.data.fakes import flip_a_byte, noise, write_images
from tests.data.reading import paths, read_batch, refused
from training.command_line import parsed

THREE_IMAGES = str(3 * 30_000 / 2**20)  # megabytes, of those in the fixture `images`


def pack(images, folder, *options):
    """Packs `images`, which are made if they do not exist."""
    if not images.exists():
        write_images(images)
    pack_images.main([str(images), str(folder), "--workers", "0", "--shard-mb", THREE_IMAGES, *options])
    return folder


class TestPacked(TransformedDataset):
    yaml = Path(__file__).parents[1] / "conf" / "data" / "packed.yaml"

    @pytest.fixture(params=["raw", "jpeg"])
    def make(self, tmp_path, request):
        folder = pack(tmp_path / "images", tmp_path / "pack", "--format", request.param)
        return partial(Packed, root=folder, image_size=32)


def test_a_pack_of_files_gives_the_batches_of_the_folder(tmp_path):
    folder = pack(tmp_path / "images", tmp_path / "pack", "--format", "jpeg")
    assert_reads_as_the_folder(partial(Packed, root=folder), tmp_path / "images")


@pytest.mark.parametrize(("options", "of_all", "levels"), [([], torch.max, 1), (["--format", "jpeg"], torch.mean, 6)])
def test_a_packs_images_are_the_files_resized_once_and_not_enlarged(tmp_path, options, of_all, levels):
    images = write_images(tmp_path / "images", ("cat",), count=0)
    for number, size in enumerate([(60, 40), (30, 90), (20, 20), (41, 300)]):
        image = Image.fromarray(noise(8, 8, 3, seed=number)).resize(size)
        for split in ("train", "val"):
            image.save(images / split / "cat" / f"{number}.{'png' if number == 3 else 'jpg'}")
    folder = ImageFolder(True, images)
    packed = Packed(True, pack(images, tmp_path / "pack", "--short-side", "32", *options))
    for index in range(4):
        expected, found = (data.whole(index) for data in (folder, packed))
        if (shorter := min(expected.shape[1:])) > 32:
            sides = tuple(side * 32 // shorter for side in expected.shape[1:])
            expected = torch.nn.functional.interpolate(expected[None], sides, mode="bilinear", antialias=True)[0]
        assert found.shape == expected.shape and of_all((found.float() - expected).abs()) <= levels
        part = packed.decoded(*packed.encoded(index), lambda size: (2, 3, 12, 15), math.inf)
        assert torch.equal(part, found[:, 3:15, 2:12])


@pytest.mark.parametrize("options", [[], ["--format", "jpeg"]])
def test_a_new_image_is_resized_as_the_pack_was_and_then_as_the_test_sample_of_its_file(tmp_path, options):
    images = write_images(tmp_path / "images")
    pixels = noise(60, 90, 3)
    file = images / "val" / "cat" / "0.png"
    Image.fromarray(pixels).save(file)
    packed = Packed(False, pack(images, tmp_path / "pack", "--short-side", "16", *options), image_size=32)
    index = paths(ImageFolder(False, images)).index(str(file))
    difference = packed.prepare(pixels).float() - packed[index]["image"].float()
    assert difference.abs().mean() <= (6 if options else 0)  # JPEGs lose some detail


@pytest.mark.parametrize(
    ("file", "spoil", "words"),
    [
        ("pack.json", Path.unlink, "PACK is not a pack: it has no pack.json; make one with"),
        ("pack.json", lambda path: path.write_text("{}"), "PACK/pack.json is damaged .it does not have version 2"),
        ("train-00000.npy", flip_a_byte, "PACK/train-00000.npy is damaged .its checksum is wrong"),
        ("train-00000.bin", lambda path: path.write_bytes(b"1"), "train-00000.bin is damaged .it has 1 bytes instead"),
    ],
)
def test_an_incomplete_or_damaged_pack_is_refused_with_the_file(tmp_path, file, spoil, words):
    folder = pack(tmp_path / "images", tmp_path / "pack")
    spoil(folder / file)
    with refused(words.replace("PACK", re.escape(str(folder)))):
        Packed(True, folder)


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_an_image_that_was_changed_is_named_when_it_is_read_or_verified(tmp_path, form, capsys):
    folder = pack(tmp_path / "images", tmp_path / "pack", "--format", form)
    pack_images.main(["--verify", str(folder)])
    assert "the checksums of all 8 images are correct" in capsys.readouterr().out
    shard = folder / "train-00000.bin"
    flip_a_byte(shard)
    packed = Packed(True, folder)
    verify = ["--verify", str(folder)]
    for read in (lambda: packed[1], lambda: read_batch(packed, 3), lambda: pack_images.main(verify)):
        with refused(re.escape(f"{shard} is damaged (the checksum of cat/1.jpg is wrong)")):
            read()
    shard.unlink()
    assert packed[3]["label"] == 1  # the other images can still be read: the file is mapped
    with refused(r"train-00000.bin is damaged .*No such file"):
        pickle.loads(pickle.dumps(packed))[3]
    shard.mkdir()
    with refused(r"train-00000.bin cannot be read .*Is a directory"):  # the system says so, whatever is in it
        pickle.loads(pickle.dumps(packed))[3]


@pytest.fixture
def images(tmp_path):
    """20 training and 4 validation images of 100 x 100 pixels, 30 kB each when raw."""
    root = write_images(tmp_path / "images", ("class 0", "class 1"), count=0)
    for split, length in (("train", 20), ("val", 4)):
        for number in range(length):
            path = root / split / f"class {number % 2}" / f"{number:02}.png"
            Image.new("RGB", (100, 100), (number, 0, 0)).save(path)
    return root


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def interrupt(images, folder, stop_at, monkeypatch):
    """Packs, and interrupts it at the image that is read as number `stop_at`."""
    original = pack_images.StoredImages.__getitem__
    reads = count(1)

    def interrupted(self, index):
        if next(reads) == stop_at:
            raise KeyboardInterrupt
        return original(self, index)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=r"^interrupted: the same command continues"):
        patch.setattr(pack_images.StoredImages, "__getitem__", interrupted)
        pack(images, folder)


def test_shards_are_filled_up_to_their_size_and_have_the_images_in_order(images, tmp_path):
    folder = pack(images, tmp_path / "pack")
    shards = [*(f"train-{number:05}" for number in range(7)), "val-00000", "val-00001"]
    assert content(folder).keys() == {"pack.json", *(f"{name}.{kind}" for name in shards for kind in ("bin", "npy"))}
    reds = [Packed(False, folder)[number]["image"][0, 0, 0].item() for number in range(4)]
    assert reds == [0, 2, 1, 3]
    assert Packed(True, folder).labels.tolist() == [0] * 10 + [1] * 10
    finished = content(folder)
    pack(images, folder, "--workers", "2")  # it is not written again
    assert content(folder) == finished == content(pack(images, tmp_path / "by workers", "--workers", "2"))


@pytest.mark.parametrize("stop_at", [1, 4, 20, 22])
def test_after_an_interruption_the_same_command_completes_the_same_pack(images, tmp_path, monkeypatch, stop_at):
    whole = pack(images, tmp_path / "whole")
    folder = tmp_path / "pack"
    interrupt(images, folder, stop_at, monkeypatch)
    with refused("unfinished pack"):
        Packed(True, folder)
    (folder / ".train-00006.bin.0").write_bytes(b"half")  # as a killed process leaves it,
    (folder / "val-00001.bin").write_bytes(b"whole")  # or one that was killed before it wrote the index
    pack(images, folder)
    assert content(folder) == content(whole)


def test_images_that_changed_in_between_are_not_mixed_with_the_earlier_ones(images, tmp_path, monkeypatch):
    interrupt(images, tmp_path / "pack", 10, monkeypatch)
    pack(images, tmp_path / "whole")
    with FileLock(tmp_path / "pack" / ".lock"), refused("is being packed by another process"):
        pack(images, tmp_path / "pack")
    moved = images / "train" / "class 0" / "18.png"
    moved.rename(images / "train" / "class 1" / "00.png")  # the order stays the same
    for folder, options in (("pack", []), ("whole", []), ("pack", ["--short-side", "64"])):
        with refused("is a pack of other images or settings"):
            pack(images, tmp_path / folder, *options)
    with refused("images is not empty"):
        pack(images, images)


def test_an_unreadable_image_ends_the_run_or_is_skipped(images, tmp_path, capsys):
    (images / "train" / "class 0" / "04.png").write_bytes(b"")
    with refused(r"04.png cannot be read as an image .*; replace or remove it, or leave it out with --skip"):
        pack(images, tmp_path / "pack")
    dataset = Packed(True, pack(images, tmp_path / "pack", "--skip"))
    assert [dataset[number]["image"][0, 0, 0].item() for number in range(3)] == [0, 2, 6] and len(dataset) == 19
    assert "left out" in "".join(capsys.readouterr())
    for path in images.glob("val/*/*.png"):
        path.write_bytes(b"")
    with refused("none of the 4 val images can be read"):
        pack(images, tmp_path / "no val", "--skip")


@pytest.mark.parametrize("option", ["--short-side=0", "--quality=0", "--quality=101", "--shard-mb=0"])
def test_a_number_out_of_its_range_is_refused(images, tmp_path, option):
    with refused(f"{option}.*give a number"):
        pack(images, tmp_path / "pack", option)


def test_the_command_that_trains_on_a_pack_can_be_pasted(images, tmp_path, capsys):
    folder = pack(images, tmp_path / "it's a=pack")
    *_, override = shlex.split(capsys.readouterr().out.partition(" val images: ")[2])
    assert parsed([override])["data.root"].value() == str(folder)


def test_a_folder_without_val_is_refused_with_what_to_move(images, tmp_path):
    shutil.rmtree(images / "val")
    with refused(r"images/val does not exist: move some images of .*images/train there"):
        pack(images, tmp_path / "pack")
