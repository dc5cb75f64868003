import errno
import logging
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps, features

from data.errors import DataError, printable, read_lines
from data.image_folder import ImageFiles, ImageFolder, find_images
from data.images import decoding
from data.images.crops import CROP_ATTEMPTS, random_crop
from loaders import WorkerLoader
from tests.data.fakes import noise, write_images
from tests.data.reading import Given, distance, paths, read_batch, refused
from tests.infrastructure.later import Later

v2 = Later("torchvision.transforms.v2")


def smooth_image(width, height):
    """Red grows to the right and green downwards, so a pixel's colour tells its position."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 90)], axis=2).astype(np.uint8))


def noisy_image(width, height):
    return Image.blend(smooth_image(width, height), Image.fromarray(noise(height, width, 3)), 0.3)


@pytest.fixture
def one_image(tmp_path):
    """A function that saves an image and returns a dataset with only this one."""

    def make(image, train=False, name="a.png", saved=None, **arguments):
        root = write_images(tmp_path / str(len(list(tmp_path.iterdir()))), ("cat",), count=0)
        for split in ("train", "val"):
            image.save(root / split / "cat" / name, **(saved or {}))
        return ImageFolder(train=train, root=root, **arguments)

    return make


def difference(ours, theirs):
    """The largest and the mean difference between the pixels of two images."""
    gap = np.abs(np.asarray(ours, dtype=np.int64) - np.asarray(theirs, dtype=np.int64))
    return gap.max(), gap.mean()


def test_all_that_torchvision_finds_is_read_in_its_order_and_what_is_left_out_is_said_in_one_line(tmp_path, caplog):
    folder = write_images(tmp_path, ("a.b", "cat"), count=1) / "train" / "cat"
    shutil.copytree(tmp_path / "val" / "cat", tmp_path / "elsewhere")
    (folder / "z").symlink_to(tmp_path / "elsewhere")
    for number, below in enumerate(("", "x", "x/y", "x-y")):
        (folder / below).mkdir(exist_ok=True)
        for suffix in ("BMP", "TIFF", "webp", "ünï.PNG", "ppm"):
            smooth_image(8, 8 + number).save(folder / below / f"{number}.{suffix}")
    theirs = [path for path, _ in Later("torchvision.datasets").ImageFolder(tmp_path / "train").samples]
    dataset = ImageFolder(train=True, root=tmp_path, image_size=8)
    assert paths(dataset) == theirs
    assert len(theirs) == 23
    assert len(list(dataset)) == len(theirs) and not caplog.text
    smooth_image(8, 8).save(folder / "x" / "0.jfif", "jpeg")  # torchvision reads no .jfif, but hidden files
    for name in ("cat/._0", "cat/.x/1.png", "cat/x/notes.txt", ".x/0.jpg", "0.jpg", "@eaDir/b/0.jpg"):
        path = tmp_path / "train" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    assert len(ImageFolder(train=True, root=tmp_path)) == len(theirs) + 1
    assert f"{tmp_path}/train: files that are not read: 6, such as 0.jpg" in caplog.text and len(caplog.records) == 1
    assert find_images(f"{folder}/") == find_images(folder)


@pytest.mark.parametrize("size", [(500, 375), (20, 899), (901, 21), (1, 100)])
@pytest.mark.parametrize(
    ("image_size", "share", "resized"), [(2, None, 2), (32, 0.95, 33), (32, 1.0, 32), (96, 96 / 118, 118)]
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_gives_the_pixels_of_torchvisions_resize_and_center_crop(
    one_image, size, image_size, share, resized, interpolation
):
    image = noisy_image(*size)
    crops = {"test_crop": share, "interpolation": interpolation}
    steps = [v2.Resize(resized, v2.InterpolationMode(interpolation)), v2.CenterCrop(image_size)]
    largest, mean = difference(one_image(image, image_size=image_size, **crops)[0]["image"], v2.Compose(steps)(image))
    assert largest <= 2 and mean < 0.1


def test_images_of_every_mode_become_rgb(one_image):
    for mode, suffix, colour, expected in (
        ("RGBA", "png", (200, 100, 50, 90), (200, 100, 50)),
        ("I;16", "png", 120 * 257, (120, 120, 120)),
        ("CMYK", "jpg", (55, 155, 205, 0), (200, 100, 50)),
    ):
        pixels = one_image(Image.new(mode, (30, 20), colour), name=f"a.{suffix}", image_size=8)[0]["image"]
        assert difference(pixels, np.broadcast_to(expected, pixels.shape))[0] <= 3, mode


RAMP = np.linspace(0, 1, 64 * 64).reshape(64, 64)
WITH_NAN = np.where(RAMP < 0.001, np.nan, RAMP)
DEEP = {  # pixels, the suffix of their file, and the values that become 0 and 255
    "16 bits": ((RAMP * 65535).astype(np.uint16), "png", (0, 65535)),
    "16 bits, high bytes first": ((RAMP * 65535).astype(">u2"), "tif", (0, 65535)),
    "16 bits in 32": ((RAMP * 60000).astype(np.int32), "tif", (0, 65535)),
    "negative": ((RAMP * 4000 - 1000).astype(np.int32), "tif", (-1000, 3000)),
    "floats to 255": ((RAMP * 255).astype(np.float32), "tif", (0, 255)),
    "floats to 65535": ((RAMP * 65535).astype(np.float32), "tif", (0, 65535)),
    "floats with NaN": (WITH_NAN.astype(np.float32), "tif", (0, 1)),
    "one large float": (np.full((64, 64), 1e6, np.float32), "tif", (1e6, 1e6 + 1)),  # without a range to divide by
}


@pytest.mark.parametrize("case", DEEP)
def test_deep_pixels_are_scaled_by_the_range_of_the_whole_image(one_image, case):
    values, suffix, (black, white) = DEEP[case]
    dataset = one_image(Image.fromarray(values), name=f"a.{suffix}", image_size=64, test_crop=1.0)
    expected = 255 * (np.nan_to_num(values.astype(np.float64)) - black) / (white - black)
    with np.errstate(invalid="raise"):
        pixels = dataset[0]["image"].numpy()
    assert np.abs(pixels - expected[..., None]).max() <= 1
    data = Path(dataset.path(0)).read_bytes()
    part = decoding.decode(data, lambda size: (8, 16, 40, 48)).permute(1, 2, 0)
    assert np.array_equal(part, pixels[16:48, 8:40]), "a crop is scaled as the whole image is"


def test_links_may_go_round_in_circles_and_each_real_folder_is_read_once(tmp_path):
    train = write_images(tmp_path) / "train"
    files = paths(ImageFolder(True, tmp_path))
    (tmp_path / "outside").mkdir()
    smooth_image(9, 9).save(tmp_path / "outside" / "x.png")
    links = {"cat/up": "..", "cat/itself": "itself", "cat/top": "../..", "dog/me": ".", "dog/me2": "."}
    links |= {"cat/a": tmp_path / "outside", "cat/b": tmp_path / "outside", "../outside/back": train / "cat"}
    for name, target in links.items():
        (train / name).symlink_to(target)
    dataset = ImageFolder(True, tmp_path)
    found = paths(dataset)
    outside = [path for path in found if path.endswith("x.png")]
    assert len(found) == 5 and len(outside) == 1
    assert sorted({*found} - {*outside}) == sorted(files)
    (train / "loop").symlink_to(".")
    with refused("loop has no images"):
        ImageFolder(True, tmp_path)


def test_a_file_is_read_whatever_its_suffix_is(one_image):
    image = smooth_image(60, 40)
    expected = one_image(image, name="a.png", image_size=32)[0]["image"]
    for suffix, format in (("jpg", "PNG"), ("png", "JPEG"), ("gif", "GIF"), ("avif", "AVIF")):
        if format != "AVIF" or features.check("avif"):
            dataset = one_image(image, name=f"a.{suffix}", saved={"format": format}, image_size=32)
            assert difference(dataset[0]["image"], expected)[1] < 8
    Path(dataset.path(0)).write_bytes(b"\0\0\0\x1cftypheic")
    with refused(r"pip install pillow-heif"):
        dataset[0]


@pytest.mark.parametrize(("suffix", "large"), [("jpg", False), ("jpg", True), ("png", False)])
def test_photographs_are_turned_upright(one_image, monkeypatch, suffix, large):
    monkeypatch.setattr(decoding, "LARGE", 0 if large else 1 << 30)
    image = smooth_image(300, 200)
    for orientation in range(1, 9):
        exif = image.getexif()
        exif[ExifTags.Base.Orientation] = orientation
        for train, random in ((False, Given([])), (True, Given([0.9, 0.8, *[0.3] * 39]))):
            turned = one_image(image, train, f"a.{suffix}", {"exif": exif.tobytes()}, image_size=32)
            upright = one_image(ImageOps.exif_transpose(image), train, f"a.{suffix}", image_size=32)
            ours, theirs = (read_batch(dataset, 1, random)["image"] for dataset in (turned, upright))
            assert difference(ours, theirs)[0] <= 8


@pytest.mark.parametrize("size, reduced", [((1216, 704), True), ((1217, 704), False), ((384, 256), False)])
def test_a_large_test_image_is_decoded_at_a_reduced_size_and_cropped_at_the_same_place(
    one_image, monkeypatch, size, reduced
):
    """A shift by one pixel of the reduced image would change the edges of the stripes by 60 and more."""
    stripes = np.arange(size[0]) * 16 // size[0] % 2 * 200 + np.zeros((size[1], 1))
    dataset = one_image(Image.fromarray(stripes.astype(np.uint8)), name="a.jpg", image_size=64)
    whole = dataset[0]["image"]
    monkeypatch.setattr(decoding, "LARGE", 0)
    large = dataset[0]["image"]
    assert difference(large, whole)[0] < 30
    assert torch.equal(large, whole) is not reduced


def test_half_of_the_training_crops_are_mirrored_and_settings_that_are_none_take_their_defaults(one_image):
    image = smooth_image(60, 40)
    given = {"image_size": 224, "interpolation": "bilinear", "test_crop": 0.875}
    assert torch.equal(*(one_image(image, **crops)[0]["image"] for crops in (dict.fromkeys(given), given)))
    torch.manual_seed(0)
    dataset, unflipped = (
        one_image(image, True, image_size=16, transform=steps) for steps in (["crop", "flip"], ["crop"])
    )
    images = torch.stack([dataset[0]["image"] for _ in range(200)]).int()
    assert 70 < (images[:, 8, 0, 0] > images[:, 8, -1, 0]).sum() < 130
    assert len(images.unique(dim=0)) > 190
    images = torch.stack([unflipped[0]["image"] for _ in range(20)])
    assert (images[:, 8, 0, 0] < images[:, 8, -1, 0]).all()
    test = one_image(image, False, image_size=16)
    assert torch.equal(dataset.without_augmentation()[0]["image"], test[0]["image"])


@pytest.mark.parametrize("size", [(40, 30), (300, 100)])
def test_training_crops_have_the_distribution_of_torchvisions(size):
    def numbers(boxes):
        """For each crop its share of the area, the logarithm of its aspect ratio, and its centre."""
        left, top, width, height = np.array(boxes, dtype=np.float64).T
        area = width * height / (size[0] * size[1])
        centre_x = (left + width / 2) / size[0]
        centre_y = (top + height / 2) / size[1]
        return np.stack([area, np.log(width / height), centre_x, centre_y])

    torch.manual_seed(0)
    image = Image.new("L", size)
    crop = v2.RandomResizedCrop(8, scale=(0.08, 1))
    theirs = [crop.make_params([image]) for _ in range(4000)]
    theirs = numbers([[box[key] for key in ("left", "top", "width", "height")] for box in theirs])
    boxes = [random_crop(size, 0.08, torch.rand(4 * CROP_ATTEMPTS).tolist()) for _ in range(4000)]
    ours = numbers([[left, top, right - left, bottom - top] for left, top, right, bottom in boxes])
    for samples in zip(ours, theirs, strict=True):
        assert distance(*samples) < 0.05  # by chance once in 10,000 times
    assert max(right for left, _, right, _ in boxes if left) == size[0], "some are at the edge"


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("bytes_left", [0, -200, None])
def test_a_file_that_cannot_be_read_is_named_also_if_its_name_is_not_utf_8(one_image, bytes_left, kind):
    name = os.fsdecode(b"b\xff") if sys.platform == "linux" else "b"  # other file systems want UTF-8
    dataset = one_image(noisy_image(60, 40), True, f"{name}.{kind}", {"format": kind}, image_size=32)
    path = Path(dataset.path(0))
    if bytes_left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:bytes_left])
    for read in (lambda: dataset[0], lambda: read_batch(dataset, 1)):
        with refused(re.escape(printable(str(path))) + r" cannot be read .*\(.+; replace"):
            read()


def test_what_the_system_refuses_is_not_put_down_to_the_image(one_image, monkeypatch):
    dataset = one_image(noisy_image(60, 40), True, "b.png", {"format": "png"}, image_size=32)

    def refused_open(*arguments, **options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("builtins.open", refused_open)
    with pytest.raises(DataError) as refusal:
        dataset[0]
    assert "Too many open files" in str(refusal.value) and "as an image" not in str(refusal.value)


def test_folders_of_val_may_differ_from_those_of_train_in_case_and_in_how_accents_are_written(tmp_path):
    root = write_images(tmp_path, ("caf\u00e9", "dog"))
    (root / "val" / "caf\u00e9").rename(root / "val" / "Cafe\u0301")
    dataset = ImageFolder(train=False, root=root)
    assert dataset.classes == ("caf\u00e9", "dog") and dataset.labels.tolist() == [0, 0, 1, 1]
    assert all(Path(dataset.path(index)).exists() for index in range(4)) and dataset[0]["label"] == 0
    write_images(tmp_path / "two", ("dog",))
    (tmp_path / "two" / "val" / "Dog").mkdir()
    with refused("Dog is a class that .* does not have"):
        ImageFolder(train=False, root=tmp_path / "two")


def test_links_to_one_file_are_one_sample_of_a_split(tmp_path):
    train = write_images(tmp_path, ("cat", "dog")) / "train"
    names = ImageFolder(train=True, root=tmp_path).sample_ids().tolist()
    (train / "cat" / "again0.jpg").symlink_to("0.jpg")
    (train / "dog" / "cat.jpg").symlink_to(train / "cat" / "again0.jpg")
    (train / "dog" / "alone.jpg").symlink_to(tmp_path / "val" / "dog" / "0.jpg")
    dataset = ImageFolder(train=True, root=tmp_path)
    known = {Path(path).name: name for path, name in zip(paths(dataset), dataset.sample_ids().tolist(), strict=True)}
    assert known["again0.jpg"] == known["cat.jpg"] == b"cat/0.jpg" and known["alone.jpg"] == b"dog/alone.jpg"
    assert {*dataset.sample_ids().tolist()} == {*names, b"dog/alone.jpg"}, "links change nothing but themselves"


def test_val_may_lack_a_class(tmp_path, caplog):
    shutil.rmtree(write_images(tmp_path, ("cat", "ape", "dog")) / "val" / "cat")
    dataset = ImageFolder(train=False, root=tmp_path)
    assert dataset.classes == ("ape", "cat", "dog") and dataset.labels.tolist() == [0, 0, 2, 2] and not caplog.text


def test_without_a_folder_val_there_is_no_test_set_and_folders_that_may_be_the_missing_one_are_named(tmp_path, caplog):
    root = write_images(tmp_path / "images")
    (root / "val").rename(tmp_path / "val")
    caplog.set_level(logging.INFO)
    dataset = ImageFolder(train=False, root=root, image_size=8, cache="ram", cache_dir=str(tmp_path / "cache"))
    assert len(dataset) == len(dataset.labels) == 0 and dataset.classes == ImageFolder(True, root).classes
    assert f"{root}/val does not exist: the test set is what data.val_fraction splits off train/" in caplog.text
    (tmp_path / "val").rename(root / "valid")
    ImageFolder(train=False, root=root)
    assert "val does not exist (or rename one of these to it: valid): the test set is" in caplog.text
    (root / "train").rename(root / "Training")
    with refused(r"train .*Training, valid\)"):
        ImageFolder(train=True, root=root)
    (root / "valid").rename(root / "val")
    with refused(rf"to evaluate {root}/val alone: ln -s val {root}/train"):
        ImageFolder(train=False, root=root)
    (root / "train").symlink_to("val")
    assert paths(ImageFolder(train=False, root=root))


def test_a_list_has_its_lines_without_empty_ones_and_a_byte_order_mark(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "names.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9 x\r\n\r\n \nb\n")
    assert read_lines("data.classes=", "~/names.txt") == ["caf\u00e9 x", "b"]
    for encoding in ("utf-16", "utf-8-sig"):
        (tmp_path / "names.txt").write_text("caf\u00e9 x\r\n\r\nb", encoding)
        assert read_lines("data.classes=", "~/names.txt") == ["caf\u00e9 x", "b"]
    (tmp_path / "names.txt").write_bytes("\u00e9".encode("latin-1"))
    with refused(r"data.classes=~/names.txt"):
        read_lines("data.classes=", "~/names.txt")


@pytest.mark.parametrize(("workers", "method"), [(0, "thread"), (1, "multiprocessing"), (2, "thread")])
def test_the_size_of_images_may_change_between_two_epochs(workers, method, tmp_path):
    dataset = ImageFolder(train=True, root=write_images(tmp_path), image_size=8)
    settings = {"num_workers": workers, "worker_method": method, "persistent_workers": workers > 0}
    sizes = []
    with WorkerLoader(dataset, 4, seed=0, **settings) as loader:
        for size in (8, 12, 12, 6):
            dataset.image_size = size
            sizes += [batch["image"].shape[1] for batch in loader]
    assert sizes == [8, 12, 12, 6]


def test_labels_of_an_own_class_may_be_a_list_a_tensor_or_a_column_and_have_to_be_numbers(tmp_path):
    folder = write_images(tmp_path, ("cat", "dog"), count=2) / "train"

    class Photos(ImageFiles):
        classes = ("cat", "dog")

        def __init__(self, labels):
            super().__init__(True, image_size=8)
            self.files = sorted(folder.glob("*/*"))
            self.labels = labels

        def path(self, index):
            return str(self.files[index])

    column = pytest.importorskip("pandas").Series([1, 1, 0, 0], index=[3, 2, 1, 0])
    for labels in ([1, 1, 0, 0], (1, 1, 0, 0), torch.tensor([1, 1, 0, 0]), column, [torch.tensor(1)] * 2 + [0] * 2):
        dataset = Photos(labels)
        assert read_batch(dataset, 4)["label"].tolist() == [1, 1, 0, 0]
        assert [dataset[index]["label"].item() for index in range(4)] == [1, 1, 0, 0]
    for labels in (["cat"] * 4, [[1], [0, 1], [0], [0]], 3):
        with refused("Photos.labels cannot be used .*self.classes.index"):
            Photos(labels)
