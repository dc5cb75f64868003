"""models/small_cnn.py; what every network promises is in test_models.py."""

import pytest
import torch
from torch.nn import functional as F

from models.small_cnn import SmallCNN


def test_width_sets_the_number_of_channels() -> None:
    narrow, wide = (SmallCNN(num_classes=10, in_channels=1, width=width) for width in (8, 32))
    assert narrow.classifier.in_features == 64
    assert wide.classifier.in_features == 256


def test_a_width_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="width=0: give a whole number, at least 1"):
        SmallCNN(num_classes=10, in_channels=1, width=0)


def test_every_parameter_gets_a_gradient() -> None:
    model = SmallCNN(num_classes=10, in_channels=3)
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8)).backward()
    without = [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0]
    assert without == []


def test_features_of_channels_last_images_are_channels_last() -> None:
    model = SmallCNN(num_classes=10, in_channels=3).eval().to(memory_format=torch.channels_last)
    images = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert model.features(images).is_contiguous(memory_format=torch.channels_last)
