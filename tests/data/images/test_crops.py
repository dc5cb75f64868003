"""data/images/crops.py: interpolation and the size of test images; tests/data/test_image_folder.py has the rest."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from later import Later
from PIL import Image

from data.errors import DataError
from data.images.crops import CroppedDataset, resize
from data.images.decoding import Box, Size

v2 = Later("torchvision.transforms.v2")


class OneImage(CroppedDataset):
    """A smooth image with noise, 90 x 60 pixels."""

    classes, labels = ("one",), np.zeros(1, np.int64)

    def __init__(self, train: bool = False, **crops: Any) -> None:
        super().__init__(train, **crops)
        pixels = np.random.default_rng(0).integers(256, size=(6, 9, 3), dtype=np.uint8)
        self.image = Image.fromarray(pixels).resize((90, 60), Image.Resampling.BICUBIC)

    def read(self, index: int, crop: Callable[[Size], Box], enough: float) -> torch.Tensor:
        return torch.from_numpy(np.array(self.image.crop(crop(self.image.size)))).permute(2, 0, 1)


def largest_difference(ours: torch.Tensor, theirs: Any) -> int:
    return int((ours.int() - torch.from_numpy(np.asarray(theirs).astype(np.int32))).abs().max())


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("side", [20, 200])
def test_resizing_gives_pillows_pixels_but_for_two_levels(interpolation: str, side: int) -> None:
    dataset = OneImage()
    ours = torch.empty((1, side, side, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    resize(dataset.read(0, lambda size: (0, 0, *size), 0), ours, interpolation)
    theirs = dataset.image.resize((side, side), Image.Resampling[interpolation.upper()])
    assert largest_difference(ours[0].permute(1, 2, 0), theirs) <= 2


@pytest.mark.parametrize(
    ("size", "share", "resized"), [(32, None, 36), (32, 0.95, 33), (32, 1.0, 32), (96, 96 / 118, 118)]
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_test_sample_is_that_share_of_the_resized_image(
    size: int, share: float, resized: int, interpolation: str
) -> None:
    dataset = OneImage(image_size=size, test_crop=share, interpolation=interpolation)
    steps = [v2.Resize(resized, v2.InterpolationMode(interpolation)), v2.CenterCrop(size)]
    assert largest_difference(dataset[0]["image"], v2.Compose(steps)(dataset.image)) <= 2


@pytest.mark.parametrize("train", [True, False])
def test_settings_that_are_none_take_their_defaults(train: bool) -> None:
    given = {"image_size": 224, "interpolation": "bilinear", "test_crop": 0.875}
    samples = []
    for dataset in (OneImage(train), OneImage(train, **dict.fromkeys(given)), OneImage(train, **given)):
        torch.manual_seed(0)
        samples.append(dataset[0]["image"])
    assert samples[0].shape == (224, 224, 3)
    assert torch.equal(samples[0], samples[1]) and torch.equal(samples[0], samples[2])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"image_size": "large"}, "data.image_size=large must be a whole number, at least 1"),
        ({"min_area": 0}, "data.min_area=0 must be a number above 0 and at most 1"),
        ({"test_crop": 1.1}, "data.test_crop=1.1 must be a number above 0 and at most 1"),
        ({"interpolation": "cubic"}, r"data.interpolation=cubic: did you mean bicubic\? it is one of"),
    ],
)
def test_a_value_that_cannot_work_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        OneImage(**wrong)
