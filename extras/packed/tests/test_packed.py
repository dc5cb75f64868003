import math
import pickle
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.image_folder import ImageFolder
from data.images.decoding import whole
from extras.packed import pack_images
from extras.packed.packed import Packed
from tests.data.contract import ImageDataset, assert_reads_as_the_folder
from tests.data.fakes import flip_a_byte, write_images
from tests.data.reading import read_batch


def write_pack(folder: Path, *options: str) -> Path:
    """Packs folder/images, which is made if it does not exist, into folder/pack."""
    if not (folder / "images").exists():
        write_images(folder / "images")
    pack_images.main([str(folder / "images"), str(folder / "pack"), "--workers", "0", *options])
    return folder / "pack"


class TestPacked(ImageDataset):
    yaml = Path(__file__).parents[1] / "conf" / "data" / "packed.yaml"

    @pytest.fixture(params=["raw", "jpeg"])
    def make(self, tmp_path, request):
        return partial(Packed, root=write_pack(tmp_path, "--format", request.param), image_size=32)


def test_a_pack_of_files_gives_the_batches_of_the_folder(tmp_path):
    assert_reads_as_the_folder(partial(Packed, root=write_pack(tmp_path, "--format", "jpeg")), tmp_path / "images")


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


@pytest.mark.parametrize(("options", "of_all", "levels"), [([], torch.max, 1), (["--format", "jpeg"], torch.mean, 6)])
def test_a_packs_images_are_the_files_resized_once(photographs, options, of_all, levels):
    folder = ImageFolder(True, photographs / "images")
    pack = Packed(True, write_pack(photographs, "--short-side", "32", *options))
    for index in range(4):
        original, packed = (data.decoded(*data.encoded(index), whole, math.inf) for data in (folder, pack))
        sides = original.shape[1:]
        if min(sides) > 32:
            sides = tuple(side * 32 // min(sides) for side in sides)
            expected = torch.nn.functional.interpolate(original[None], sides, mode="bilinear", antialias=True)[0]
        else:
            expected = original
        assert packed.shape == (3, *sides)
        assert of_all((packed.float() - expected).abs()) <= levels
        part = pack.decoded(*pack.encoded(index), lambda size: (2, 3, 12, 15), math.inf)
        assert torch.equal(part, packed[:, 3:15, 2:12])


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
    pack = write_pack(tmp_path)
    spoil(pack / file)
    with pytest.raises(DataError, match=words.replace("PACK", re.escape(str(pack)))):
        Packed(True, pack)


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_an_image_that_was_changed_is_named_when_it_is_read_or_verified(tmp_path, form, capsys):
    folder = write_pack(tmp_path, "--format", form)
    pack_images.main(["--verify", str(folder)])
    assert "the checksums of all 8 images are correct" in capsys.readouterr().out
    shard = folder / "train-00000.bin"
    flip_a_byte(shard)
    pack = Packed(True, folder)
    for read in (lambda: pack[1], lambda: read_batch(pack, 3), lambda: pack_images.main(["--verify", str(folder)])):
        with pytest.raises(DataError, match=re.escape(f"{shard} is damaged (the checksum of cat/1.jpg is wrong)")):
            read()
    assert pack[3]["label"] == 1  # the other images can still be read
    shard.unlink()
    assert pack[3]["label"] == 1  # it is mapped
    with pytest.raises(DataError, match=r"train-00000.bin is damaged .*No such file"):
        pickle.loads(pickle.dumps(pack))[3]
