"""scripts/pack_images.py: what it writes, that it may be interrupted at any time, and what it refuses."""

import signal
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from data.errors import DataError
from data.packed import Packed
from scripts import pack_images
from scripts.pack_images import SPLITS

SCRIPT = Path(pack_images.__file__)


@pytest.fixture
def images(tmp_path):
    """20 training and 4 validation images of 100 x 100 pixels, 30 kB each when raw."""
    for split, count in (("train", 20), ("val", 4)):
        for number in range(count):
            folder = tmp_path / "images" / split / f"class {number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (100, 100), (number, 0, 0)).save(folder / f"{number:02}.png")
    return tmp_path / "images"


@pytest.fixture
def small_shards(monkeypatch):
    """A function that packs into shards of three images each."""
    original = pack_images.Packing.pack
    monkeypatch.setattr(
        pack_images.Packing, "pack", lambda self, split, _, *rest: original(self, split, 3 * 30_000, *rest)
    )


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pack(images, folder, *options):
    pack_images.main([str(images), str(folder), "--workers", "0", *options])
    return folder


def test_shards_are_filled_up_to_their_size_and_have_the_images_in_order(images, tmp_path, small_shards, capsys):
    folder = pack(images, tmp_path / "pack")
    assert "20 train and 4 val images: python train.py data=packed data.root=" in capsys.readouterr().out
    shards = [f"train-{number:05}.bin" for number in range(7)] + ["val-00000.bin", "val-00001.bin"]
    assert sorted(content(folder)) == sorted([*shards, "train.npy", "val.npy", "pack.json"])
    reds = [Packed(False, folder)[number]["image"][0, 0, 0].item() for number in range(4)]
    assert reds == [0, 2, 1, 3]
    assert Packed(True, folder).labels.tolist() == [0] * 10 + [1] * 10


@pytest.fixture
def interrupt(monkeypatch):
    """A function that packs, and interrupts it at the image that is read as number `stop_at`."""

    def interrupt(images, folder, stop_at=10):
        original, read = pack_images.StoredImages.__getitem__, []

        def interrupted(self, index):
            read.append(index)
            if len(read) == 24 + stop_at:  # all 24 were read to estimate the size of the pack
                raise KeyboardInterrupt
            return original(self, index)

        with monkeypatch.context() as patch:
            patch.setattr(pack_images.StoredImages, "__getitem__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pack(images, folder)

    return interrupt


@pytest.mark.parametrize("stop_at", [1, 3, 4, 19, 20, 22])
def test_after_an_interruption_the_same_command_completes_the_same_pack(
    images, tmp_path, small_shards, interrupt, stop_at
):
    whole, folder = pack(images, tmp_path / "whole"), tmp_path / "pack"
    interrupt(images, folder, stop_at)
    with pytest.raises(DataError, match="unfinished pack"):
        Packed(True, folder)
    pack(images, folder)
    assert content(folder) == content(whole)


def test_a_run_that_was_killed_within_a_shard_is_continued(python, images, tmp_path, small_shards):
    whole, folder = pack(images, tmp_path / "whole"), tmp_path / "pack"
    program = (
        "import os, signal, sys; from contextlib import contextmanager; from scripts import pack_images as p\n"
        "replacing, shards = p.replacing, []\n"
        "pack = p.Packing.pack; p.Packing.pack = lambda self, split, _, *rest: pack(self, split, 90_000, *rest)\n"
        "@contextmanager\n"
        "def dying(path):\n"
        "    shards.append(path) if path.suffix == '.bin' else None\n"
        "    with replacing(path) as file:\n"
        "        len(shards) == 3 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield file\n"
        "p.replacing = dying\n"
        "p.main([*sys.argv[1:3], '--workers', '2'])"
    )
    assert python.run("-c", program, images, folder, timeout=100).returncode == -signal.SIGKILL
    assert {"train-00000.bin", "train-00001.bin"} <= set(content(folder))
    pack(images, folder, "--workers", "2")
    assert content(folder) == content(whole)


def test_images_that_changed_in_between_are_not_mixed_with_the_earlier_ones(images, tmp_path, small_shards, interrupt):
    interrupt(images, tmp_path / "pack")
    pack(images, tmp_path / "whole")
    (images / "train" / "class 0" / "18.png").rename(
        images / "train" / "class 1" / "00.png"
    )  # the order stays the same
    for folder in (tmp_path / "pack", tmp_path / "whole"):
        with pytest.raises(DataError, match="is a pack of other images or settings"):
            pack(images, folder)


def test_a_second_process_does_not_pack_into_the_same_folder(images, tmp_path, small_shards, interrupt):
    interrupt(images, tmp_path / "pack")
    with FileLock(tmp_path / "pack" / ".lock"), pytest.raises(DataError, match="is being packed by another process"):
        pack(images, tmp_path / "pack")


def test_a_finished_pack_is_not_written_again(images, tmp_path, monkeypatch):
    folder = pack(images, tmp_path / "pack")
    monkeypatch.setattr(pack_images.Packing, "finish", None)
    pack(images, folder)


def test_with_format_jpeg_the_files_are_unchanged(images, tmp_path):
    folder = pack(images, tmp_path / "pack", "--format", "jpeg")
    first = images / "train" / "class 0" / "00.png"
    assert (folder / "train-00000.bin").read_bytes().startswith(first.read_bytes())
    assert np.load(folder / "train.npy")["name"][0] == b"class 0/00.png"


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_the_size_of_the_pack_is_told_before_it_is_written(images, tmp_path, capsys, form):
    Image.effect_noise((300, 201), 50).save(images / "train" / "class 0" / "large.png")
    folder = tmp_path / "pack"
    folder.mkdir()
    splits = {split: pack_images.ImageFolder(train=split == "train", root=images) for split in SPLITS}
    told = pack_images.Packing(splits, folder, form, 50).expected_bytes()
    pack(images, folder, "--format", form, "--short-side", "50")
    assert told == pytest.approx(sum(len(content(folder)[f"{split}-00000.bin"]) for split in SPLITS), rel=0.01)
    assert f"{folder} will take about {told / 1e6:,.1f} MB; " in capsys.readouterr().out


def test_an_unreadable_image_ends_the_run_or_is_skipped(images, tmp_path, capsys):
    bad = images / "train" / "class 0" / "04.png"
    bad.write_bytes(b"")
    with pytest.raises(DataError, match=r"04.png cannot be read as an image .* or leave it out with --skip"):
        pack(images, tmp_path / "pack")
    pack(images, tmp_path / "pack", "--skip")
    dataset = Packed(True, tmp_path / "pack")
    assert len(dataset) == 19
    assert [dataset[number]["image"][0, 0, 0].item() for number in range(3)] == [0, 2, 6]
    assert "left out" in "".join(capsys.readouterr())


def test_a_split_without_readable_images_is_refused(images, tmp_path):
    for path in images.glob("val/*/*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of the 4 val images can be read"):
        pack(images, tmp_path / "pack", "--skip")


def test_verifying_finds_a_changed_byte(images, tmp_path, capsys):
    folder = pack(images, tmp_path / "pack")
    pack_images.main(["--verify", str(folder)])
    assert "the checksums of all 24 images are correct" in capsys.readouterr().out
    shard = folder / "val-00000.bin"
    data = bytearray(shard.read_bytes())
    data[65_000] ^= 4
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"val-00000.bin is damaged .the checksum of class 1/01.png is wrong"):
        pack_images.main(["--verify", str(folder)])


def test_wrong_arguments_are_refused_in_a_sentence(images, tmp_path):
    pack(images, tmp_path / "pack")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.doc").touch()
    for arguments, words in (
        ([tmp_path / "none", tmp_path / "new"], "none is not a folder"),
        ([images, tmp_path / "full"], "full is not empty"),
        ([images, tmp_path / "pack", "--short-side", "64"], "pack is a pack of other images or settings"),
        ([images, tmp_path / "new", "--format", "raww"], r"--format=raww: did you mean raw\? it is one of raw, jpeg"),
        ([images, tmp_path / "new", "--shard-mb", "0"], "--shard-mb 0: give a number from 1"),
        ([tmp_path / "new"], "give two folders"),
    ):
        with pytest.raises(DataError, match=words):
            pack_images.main([str(argument) for argument in arguments])
    assert not (tmp_path / "new").exists()


def test_on_the_command_line_an_error_is_one_sentence(python, tmp_path):
    result = python.run(SCRIPT, tmp_path / "none", tmp_path / "pack", timeout=100, quick_exit=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
