"""ImageFiles prepares files as the datasets of the networks did, and Guarded raises for none."""

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.guarded import Guarded, text_of
from data.image_files import ImageFiles, image_files, largest_middle
from data.image_folder import ImageFolder


def test_photographs_are_cropped_as_the_test_images_of_an_image_folder(write_images, tmp_path):
    folder = ImageFolder(train=False, root=write_images(tmp_path), image_size=16)
    files = ImageFiles([folder.path(index) for index in range(4)], (16, 16, 3), test_crop=224 / 256)
    for index in range(4):
        assert torch.equal(files[index]["image"], folder[index]["image"])


@pytest.mark.parametrize("channels, mode", [(1, "L"), (3, "RGB")])
def test_images_that_have_the_networks_size_are_not_changed(tmp_path, channels, mode):
    pixels = np.random.default_rng(0).integers(256, size=(8, 12, channels), dtype=np.uint8)
    Image.fromarray(pixels.squeeze()).convert(mode).save(tmp_path / "a.png")
    sample = ImageFiles([str(tmp_path / "a.png")], (8, 12, channels))[0]
    assert np.array_equal(sample["image"].numpy(), pixels)


def test_other_images_are_resized_from_their_largest_middle_part_and_coloured_ones_become_grey(tmp_path):
    picture = Image.new("RGB", (40, 20), (255, 0, 0))
    picture.paste((0, 0, 255), (10, 0, 30, 20))
    picture.save(tmp_path / "a.png")
    image = ImageFiles([str(tmp_path / "a.png")], (5, 5, 3))[0]["image"]
    assert torch.equal(image, torch.tensor([0, 0, 255], dtype=torch.uint8).expand(5, 5, 3))
    grey = ImageFiles([str(tmp_path / "a.png")], (5, 5, 1))[0]["image"]
    assert np.array_equal(grey[..., 0].numpy(), np.asarray(picture.crop((10, 0, 30, 20)).resize((5, 5)).convert("L")))
    assert largest_middle((100, 30), 1 / 2) == (42, 0, 57, 30)
    assert largest_middle((30, 100), 2) == (0, 42, 30, 57)


def test_an_image_that_cannot_be_read_gives_its_reason_instead(tmp_path):
    guarded = Guarded(ImageFiles([str(tmp_path / "no.png"), str(tmp_path / "a.png")], (4, 4, 3)), (4, 4, 3))
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    bad, good = guarded[0], guarded[1]
    assert "no.png cannot be read as an image" in text_of(bad["reason"])
    assert text_of(good["reason"]) == "" and int(good["index"]) == 1
    assert {name: tensor.shape for name, tensor in bad.items()} == {
        name: tensor.shape for name, tensor in good.items()
    }


class Tagged:
    """A dataset whose read_batch writes several labels per image, and a field beside them."""

    def __len__(self):
        return 2

    def sample_spec(self):
        return {
            "image": ((4, 4, 3), torch.uint8),
            "label": ((5,), torch.float32),
            "weight": ((), torch.float32),
        }

    def __getitem__(self, index):
        raise NotImplementedError

    def read_batch(self, indices, out, random):
        out["image"].fill_(7)
        out["label"].numpy()[:] = np.zeros((len(indices), 5))
        out["weight"].fill_(1.0)


def test_images_of_a_dataset_with_other_labels_and_fields_can_be_read():
    sample = Guarded(Tagged(), (4, 4, 3))[1]
    assert text_of(sample["reason"]) == ""
    assert sample["image"].unique().tolist() == [7]


def test_networks_for_other_channels_take_no_files():
    with pytest.raises(DataError, match="takes images of 4 channels; image files can only give 1 or 3"):
        ImageFiles(["a.png"], (4, 4, 4))


def test_folders_are_searched_to_the_bottom_and_hidden_files_left_out(tmp_path):
    for name in ("b/2.jpg", "b/1.PNG", "a/deep/er/3.jpeg", "a/notes.txt", "a/.hidden.jpg", ".git/4.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [path.removeprefix(f"{tmp_path}/") for path in image_files([str(tmp_path)])]
    assert found == ["a/deep/er/3.jpeg", "b/1.PNG", "b/2.jpg"]
