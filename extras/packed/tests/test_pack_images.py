"""extras/packed/pack_images.py: what it writes, that it may be interrupted at any time, and what it refuses."""

import pytest
from filelock import FileLock
from PIL import Image

from data.errors import DataError
from extras.packed import pack_images
from extras.packed.packed import Packed

THREE_IMAGES = 3 * 30_000 / 2**20  # megabytes


@pytest.fixture
def images(tmp_path):
    """20 training and 4 validation images of 100 x 100 pixels, 30 kB each when raw."""
    for split, count in (("train", 20), ("val", 4)):
        for number in range(count):
            folder = tmp_path / "images" / split / f"class {number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (100, 100), (number, 0, 0)).save(folder / f"{number:02}.png")
    return tmp_path / "images"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def pack(images, folder, *options):
    small = ["--workers", "0", "--shard-mb", str(THREE_IMAGES)]
    pack_images.main([str(images), str(folder), *small, *map(str, options)])
    return folder


def interrupt(images, folder, stop_at, monkeypatch):
    """Packs, and interrupts it at the image that is read as number `stop_at`."""
    original, read = pack_images.StoredImages.__getitem__, []

    def interrupted(self, index):
        read.append(index)
        if len(read) == 24 + stop_at:  # all 24 were read to estimate the size of the pack
            raise KeyboardInterrupt
        return original(self, index)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=r"^interrupted: the same command continues"):
        patch.setattr(pack_images.StoredImages, "__getitem__", interrupted)
        pack(images, folder)


def test_shards_are_filled_up_to_their_size_and_have_the_images_in_order(images, tmp_path, capsys):
    folder = pack(images, tmp_path / "pack")
    size = sum(path.stat().st_size for path in folder.glob("*.bin"))
    assert f"{folder} will take about {size / 1e6:,.1f} MB; " in capsys.readouterr().out
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
    whole, folder = pack(images, tmp_path / "whole"), tmp_path / "pack"
    interrupt(images, folder, stop_at, monkeypatch)
    with pytest.raises(DataError, match="unfinished pack"):
        Packed(True, folder)
    (folder / ".train-00006.bin.0").write_bytes(b"half")  # as a killed process leaves it,
    (folder / "val-00001.bin").write_bytes(b"whole")  # or one that was killed before it wrote the index
    pack(images, folder)
    assert content(folder) == content(whole)


def test_images_that_changed_in_between_are_not_mixed_with_the_earlier_ones(images, tmp_path, monkeypatch):
    interrupt(images, tmp_path / "pack", 10, monkeypatch)
    pack(images, tmp_path / "whole")
    with FileLock(tmp_path / "pack" / ".lock"), pytest.raises(DataError, match="is being packed by another process"):
        pack(images, tmp_path / "pack")
    moved = images / "train" / "class 0" / "18.png"
    moved.rename(images / "train" / "class 1" / "00.png")  # the order stays the same
    for folder, options in (("pack", []), ("whole", []), ("pack", ["--short-side", "64"])):
        with pytest.raises(DataError, match="is a pack of other images or settings"):
            pack(images, tmp_path / folder, *options)
    with pytest.raises(DataError, match="images is not empty"):
        pack(images, images)


def test_an_unreadable_image_ends_the_run_or_is_skipped(images, tmp_path, capsys):
    (images / "train" / "class 0" / "04.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"04.png cannot be read as an image .* or leave it out with --skip"):
        pack(images, tmp_path / "pack")
    dataset = Packed(True, pack(images, tmp_path / "pack", "--skip"))
    assert [dataset[number]["image"][0, 0, 0].item() for number in range(3)] == [0, 2, 6] and len(dataset) == 19
    assert "left out" in "".join(capsys.readouterr())
    for path in images.glob("val/*/*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of the 4 val images can be read"):
        pack(images, tmp_path / "no val", "--skip")
