"""ImageFiles prepares files as the datasets of the networks did, and BlackIfDamaged raises for none."""

import numpy as np
import pytest
import torch
from fakes import write_images
from PIL import Image
from torch.utils.data import default_collate

from data.array_dataset import ArrayDataset, resized_middle
from data.errors import DataError
from extras.finished.image_files import BlackIfDamaged, ImageFiles, image_files
from data.image_folder import ImageFolder


def fitted(paths, shape):
    """ImageFiles for a network of images (height, width, channels) that are all of one size."""
    images = np.zeros((1, *shape), np.uint8)
    dataset = ArrayDataset(images, np.zeros(1, int), classes=["a"], mean=[0.5], std=[0.5], train=False)
    return ImageFiles([str(path) for path in paths], dataset.prepare, shape[2])


@pytest.mark.parametrize("interpolation, test_crop", [("bilinear", None), ("bicubic", 0.5)])
def test_photographs_are_cropped_as_the_test_images_of_an_image_folder(tmp_path, interpolation, test_crop):
    crops = {"image_size": 16, "interpolation": interpolation, "test_crop": test_crop}
    folder = ImageFolder(train=False, root=write_images(tmp_path), **crops)
    files = ImageFiles([folder.path(index) for index in range(4)], folder.prepare, 3)
    for index in range(4):
        assert torch.equal(files[index]["image"], folder[index]["image"])


@pytest.mark.parametrize("channels, mode", [(1, "L"), (3, "RGB")])
def test_images_that_have_the_networks_size_are_not_changed(tmp_path, channels, mode):
    pixels = np.random.default_rng(0).integers(256, size=(8, 12, channels), dtype=np.uint8)
    Image.fromarray(pixels.squeeze()).convert(mode).save(tmp_path / "a.png")
    assert np.array_equal(fitted([tmp_path / "a.png"], (8, 12, channels))[0]["image"], pixels)


def test_other_images_are_resized_from_their_largest_middle_part_and_coloured_ones_become_grey(tmp_path):
    picture = Image.new("RGB", (40, 20), (255, 0, 0))
    picture.paste((0, 0, 255), (10, 0, 30, 20))
    picture.save(tmp_path / "a.png")
    image = fitted([tmp_path / "a.png"], (5, 5, 3))[0]["image"]
    assert np.array_equal(image, np.broadcast_to([0, 0, 255], (5, 5, 3)))
    grey = fitted([tmp_path / "a.png"], (5, 5, 1))[0]["image"]
    assert np.array_equal(grey[..., 0], np.asarray(picture.crop((10, 0, 30, 20)).convert("L").resize((5, 5))))
    noise = np.random.default_rng(0).integers(256, size=(30, 100, 1), dtype=np.uint8)
    assert np.array_equal(resized_middle(noise, 30, 15), noise[:, 42:57])
    assert np.array_equal(resized_middle(noise.transpose(1, 0, 2), 15, 30), noise[:, 42:57].transpose(1, 0, 2))


def read(dataset):
    """The batch of all samples."""
    return default_collate([dataset[index] for index in range(len(dataset))])


def test_an_image_that_cannot_be_read_is_black_and_has_its_reason(tmp_path):
    Image.new("RGB", (4, 4), (7, 7, 7)).save(tmp_path / "a.png")
    batch = read(BlackIfDamaged(fitted([tmp_path / "no.png", tmp_path / "a.png"], (4, 4, 3)), (4, 4, 3)))
    assert "no.png cannot be read as an image" in batch["reason"][0] and batch["reason"][1] == ""
    assert [image.unique().tolist() for image in batch["image"]] == [[0], [7]] and batch["index"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda image: image[:, :, :1], "images of torch.uint8 (4, 4, 3), and the dataset made torch.uint8 (4, 4, 1)"),
        (lambda image: image / 255, "the dataset made torch.float64 (4, 4, 3)"),
        (lambda image: image.convert("RGB"), "prepare(image) cannot take "),
    ],
)
def test_what_a_network_does_not_take_is_not_converted_but_refused(tmp_path, prepare, reason):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    batch = read(BlackIfDamaged(ImageFiles([str(tmp_path / "a.png")], prepare, 3), (4, 4, 3)))
    assert reason in batch["reason"][0] and not batch["image"].any()


def test_the_samples_of_a_dataset_may_be_tuples():
    image = torch.full((4, 4, 3), 7, dtype=torch.uint8)
    batch = read(BlackIfDamaged([(image, 1.5), {"image": image, "weight": 1.0}], (4, 4, 3)))
    assert batch["reason"] == ["", ""] and batch["image"].unique().tolist() == [7]


def test_networks_for_other_channels_take_no_files():
    with pytest.raises(DataError, match="takes images of 4 channels; image files can only give 1 or 3"):
        ImageFiles(["a.png"], np.asarray, 4)


def test_folders_are_searched_to_the_bottom_and_hidden_files_left_out(tmp_path):
    for name in ("b/2.jpg", "b/1.PNG", "a/deep/er/3.jpeg", "a/notes.txt", "a/.hidden.jpg", ".git/4.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [path.removeprefix(f"{tmp_path}/") for path in image_files([str(tmp_path)])]
    assert found == ["a/deep/er/3.jpeg", "b/1.PNG", "b/2.jpg"]
