"""data/images/decoders.py: every decoder gives the same pixels, and what one cannot read goes to the next."""

import io
from functools import partial
from importlib import import_module
from itertools import product

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from data.image_folder import ImageFolder
from data.images import decoders, decoding
from data.images.decoding import decode
from loaders import WorkerLoader
from tests.data.fakes import write_images
from tests.data.reading import assert_equal_batches, refused

KINDS = {
    **{f"{sampling} {kind}": {"subsampling": sampling, "progressive": kind == "progressive"}
       for sampling in ("4:4:4", "4:2:2", "4:2:0", "4:1:1") for kind in ("baseline", "progressive")},
    "progressive with restart markers": {"restart_marker_blocks": 3, "progressive": True},
    "rgb": {"keep_rgb": True},
    "grey": {},
    "cmyk": {},
}  # fmt: skip


def jpeg(generator, kind, size, orientation=1):
    """A random JPEG of one of the KINDS, with soft and sharp edges."""
    width, height = size
    small = generator.integers(256, size=(height // 7 + 1, width // 7 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
    image = image.convert({"grey": "L", "cmyk": "CMYK"}.get(kind, "RGB"))
    exif = image.getexif()
    exif[ExifTags.Base.Orientation] = orientation
    settings = {"quality": int(generator.integers(40, 96))} | KINDS[kind]
    file = io.BytesIO()
    image.save(file, "jpeg", exif=exif.tobytes() if orientation > 1 else b"", **settings)
    return file.getvalue()


def random_box(generator, size, most):
    """A box of one to `most` pixels a side in an image of this size (width, height)."""
    left, top = (int(generator.integers(side)) for side in size)
    width, height = (1 + int(generator.integers(min(most, side))) for side in size)
    return left, top, min(left + width, size[0]), min(top + height, size[1])


@pytest.mark.parametrize("name", decoders.DECODERS)
def test_a_decoder_reads_a_box_with_the_pixels_of_the_whole_image(name):
    try:
        decoders.DECODERS[name][1]()
    except Exception as error:
        pytest.skip(f"{name} cannot be imported: {error}")
    generator = np.random.default_rng(0)
    read = dict.fromkeys(KINDS, 0)
    for kind, number in product(KINDS, range(16)):
        stored = tuple(generator.integers(1, 120, size=2).tolist())
        orientation = 1 + number % 8
        data = jpeg(generator, kind, stored, orientation)
        whole = decode(data, decoding.whole)
        for most in (20, 20, *[120] * 4):
            left, top, right, bottom = box = random_box(generator, (whole.shape[2], whole.shape[1]), most)
            pixels = getattr(decoders, name)(data, lambda _, box=box: box)
            if pixels is not None:
                assert torch.equal(pixels, whole[:, top:bottom, left:right]), (kind, stored, orientation, box)
                read[kind] += 1
    if name == "nvimgcodec":
        assert read.pop("cmyk") == 0 and min(read.values()) > 0
    else:
        assert set(read.values()) == {16 * 6}


@pytest.mark.parametrize(("train", "worker_method"), [(True, "thread"), (False, "multiprocessing")])
def test_batches_depend_neither_on_the_decoder_nor_on_where_it_runs(tmp_path, train, worker_method):
    generator = np.random.default_rng(3)
    write_images(tmp_path, ("cat",), count=0)
    for split, (number, kind) in product(("train", "val"), enumerate(KINDS)):
        (tmp_path / split / "cat" / f"{number}.jpg").write_bytes(jpeg(generator, kind, (90, 70), 1 + number % 8))
    theirs, ours = (ImageFolder(train, tmp_path, image_size=24, decoder=name) for name in ("pillow", "auto"))
    expected = list(WorkerLoader(theirs, 4, seed=0))
    assert_equal_batches(next(WorkerLoader(ours, 4, seed=0)), expected[0])  # it has a decoder before it forks
    with WorkerLoader(ours, 4, num_workers=2, worker_method=worker_method, seed=0) as loader:
        for batch, other in zip(loader, expected, strict=True):
            assert_equal_batches(batch, other)


def test_nvimgcodec_leaves_unusual_files_and_narrow_boxes_to_the_next_decoder():
    data, cmyk = (jpeg(np.random.default_rng(5), kind, (90, 70)) for kind in ("4:2:0 baseline", "cmyk"))
    frame = data.index(b"\xff\xc0")
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>"
    unusual = {
        "cut short": data[:-2],
        "cut in the header": data[:30],
        "cmyk": cmyk,
        "12 bits": data[: frame + 4] + b"\x0c" + data[frame + 5 :],
        "arithmetic": data[: frame + 1] + b"\xc9" + data[frame + 2 :],
        "no height": data[: frame + 5] + b"\0\0" + data[frame + 7 :],
        "xmp": data[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + data[2:],
        "not a jpeg": b"\x89PNG" + data[4:],
    }
    for kind, spoiled in unusual.items():
        assert decoders.nvimgcodec(spoiled, lambda _: (10, 10, 40, 40)) is None, kind
    assert decoders.nvimgcodec(data, lambda _: (10, 10, 11, 60)) is None


def test_the_fastest_decoder_that_is_installed_is_chosen(monkeypatch):
    decoders_for = decoders.decoders_for.__wrapped__  # without its cache
    assert decoders_for("pillow") == ()
    for name, rest in (("nvimgcodec", (decoders.torchvision,)), ("torchvision", ())):
        monkeypatch.setitem(
            decoders.DECODERS, name, (getattr(decoders, name), partial(import_module, "no_such_module"))
        )
        assert decoders_for("auto") == rest
        with refused(rf"data.decoder={name} .*No module named"):
            decoders_for(name)
