import os
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from data.errors import DataError
from data.image_folder import CROP_ATTEMPTS, ImageFolder, random_crop


def smooth_image(width, height):
    """Every pixel tells where it was: red grows to the right, green downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 90)], axis=2).astype(np.uint8))


def test_classes_are_the_sorted_folders_and_files_are_sorted_within_them(tmp_path, write_images):
    dataset = ImageFolder(train=True, root=str(write_images(tmp_path, ("dog", "cat"), count=3)))
    assert dataset.classes == ("cat", "dog")
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert [os.fsdecode(name) for name in dataset._files] == ["0.jpg", "1.jpg", "2.jpg"] * 2


def test_suffixes_count_in_any_case_and_hidden_or_other_files_do_not(tmp_path, write_images):
    write_images(tmp_path, ("cat",), count=1)
    folder = tmp_path / "train" / "cat"
    for name in ("B.JPEG", "ünïcode.PNG"):
        smooth_image(8, 8).save(folder / name)
    for name in ("._0.jpg", ".hidden.png", "notes.txt"):
        (folder / name).write_text("not an image")
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "train" / "README.md").write_text("not a class")
    dataset = ImageFolder(train=True, root=tmp_path, image_size=8)
    assert [os.fsdecode(name) for name in dataset._files] == ["0.jpg", "B.JPEG", "ünïcode.PNG"]
    assert len([sample for sample in dataset]) == 3


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (64, 64), (20, 900)])
@pytest.mark.parametrize("image_size", [224, 64, 2])
def test_evaluation_gives_the_pixels_of_torchvisions_resize_and_center_crop(tmp_path, size, image_size, write_images):
    write_images(tmp_path, ("cat",), count=0)
    for split in ("train", "val"):
        smooth_image(*size).save(tmp_path / split / "cat" / "a.png")
    ours = ImageFolder(train=False, root=tmp_path, image_size=image_size)[0]["image"]
    theirs = v2.Compose([v2.Resize(image_size * 256 // 224), v2.CenterCrop(image_size)])(smooth_image(*size))
    assert (ours.int() - torch.from_numpy(np.array(theirs)).int()).abs().max() <= 2


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_every_kind_of_image_becomes_rgb(tmp_path, mode, write_images):
    write_images(tmp_path, ("cat",), count=0)
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new(mode, (30, 20)).save(tmp_path / "train" / "cat" / f"a.{suffix}")
    assert ImageFolder(train=True, root=tmp_path, image_size=8)[0]["image"].shape == (8, 8, 3)


def test_training_crops_vary_and_half_of_them_are_mirrored(tmp_path, write_images):
    write_images(tmp_path, ("cat",), count=0)
    smooth_image(60, 40).save(tmp_path / "train" / "cat" / "a.png")
    torch.manual_seed(0)
    dataset = ImageFolder(train=True, root=tmp_path, image_size=16)
    images = torch.stack([dataset[0]["image"] for _ in range(200)]).int()
    mirrored = images[:, 8, 0, 0] > images[:, 8, -1, 0]
    assert 70 < mirrored.sum() < 130
    assert len(images.unique(dim=0)) > 190
    upright = ImageFolder(train=True, root=tmp_path, image_size=16, flip=False)
    assert all(image[8, 0, 0] < image[8, -1, 0] for image in (upright[0]["image"] for _ in range(20)))


@pytest.mark.parametrize("size", [(500, 375), (37, 400), (1, 1), (1000, 1)])
def test_training_crops_lie_within_the_image_and_are_of_the_asked_area_and_shape(size):
    generator = np.random.default_rng(0)
    boxes = [random_crop(size, 0.25, generator.random(4 * CROP_ATTEMPTS).tolist()) for _ in range(300)]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
    if size == (500, 375):
        shares = [(right - left) * (bottom - top) / (500 * 375) for left, top, right, bottom in boxes]
        ratios = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
        assert 0.24 < min(shares) < 0.3 and 0.9 < max(shares) <= 1
        assert 0.74 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.35


def test_training_crops_are_distributed_as_torchvisions():
    torch.manual_seed(0)
    image = smooth_image(120, 50)
    theirs = [v2.RandomResizedCrop(8, scale=(0.08, 1)).make_params([image]) for _ in range(2000)]
    ours = [random_crop(image.size, 0.08, torch.rand(4 * CROP_ATTEMPTS).tolist()) for _ in range(2000)]
    expected = np.mean([[crop["left"], crop["top"], crop["width"], crop["height"]] for crop in theirs], axis=0)
    actual = np.mean([[left, top, right - left, bottom - top] for left, top, right, bottom in ours], axis=0)
    assert np.allclose(actual, expected, atol=3)  # of 120 x 50 pixels; five standard errors are 3 at most


@pytest.mark.parametrize("content", ["empty", "truncated", "text", "vanished", "folder"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, write_images):
    write_images(tmp_path)
    path = tmp_path / "train" / "dog" / "1.jpg"
    dataset = ImageFolder(train=True, root=tmp_path)
    if content == "empty":
        path.write_bytes(b"")
    elif content == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif content == "text":
        path.write_text("<html>404</html>")
    else:
        path.unlink()
    if content == "folder":
        path.mkdir()
    with pytest.raises(DataError, match=re.escape(f"{path} cannot be read as an image")):
        dataset[3]
    assert dataset[2]["label"].item() == 1


@pytest.mark.parametrize(
    "spoil, train, words",
    [
        (lambda root: shutil.rmtree(root), True, "ROOT is not a folder; data.root must name"),
        (lambda root: shutil.rmtree(root / "train"), False, "ROOT/train is not a folder"),
        (lambda root: shutil.rmtree(root / "val"), False, "ROOT/val is not a folder"),
        (
            lambda root: [shutil.rmtree(root / "train" / name) for name in ("cat", "dog")],
            True,
            "no class folders",
        ),
        (lambda root: (root / "train" / "owl").mkdir(), True, "ROOT/train/owl has no images"),
        (lambda root: (root / "val" / "owl").mkdir(), False, "ROOT/val/owl is a class that ROOT/train lacks"),
    ],
)
def test_a_folder_that_is_not_as_expected_is_named(tmp_path, spoil, train, words, write_images):
    root = write_images(tmp_path / "images")
    spoil(root)
    with pytest.raises(DataError, match=words.replace("ROOT", re.escape(str(root)))):
        ImageFolder(train=train, root=root)


def test_val_may_lack_a_class_and_keeps_the_labels_of_train(tmp_path, write_images):
    write_images(tmp_path, ("ape", "cat", "dog"))
    shutil.rmtree(tmp_path / "val" / "cat")
    assert ImageFolder(train=False, root=tmp_path).labels.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"root": None}, "data.root is not set.*root/train/CLASS"),
        ({"image_size": 0}, "data.image_size=0"),
        ({"min_area": 0}, "data.min_area=0"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(tmp_path, arguments, words, write_images):
    with pytest.raises(DataError, match=words):
        ImageFolder(**{"train": True, "root": write_images(tmp_path), **arguments})
