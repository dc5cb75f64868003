"""What every network of models/ promises: shapes; and a ResNet's first layers."""

import pytest
import torch

from models.linear import linear
from models.small_cnn import SmallCNN
from tests.infrastructure.later import Later

resnets = Later("models.resnet")
MODELS = {
    "linear": linear,
    "small_cnn": SmallCNN,
    "resnet50": lambda **options: resnets.resnet("resnet50", small_images=False, **options),
}


@pytest.mark.parametrize("name", MODELS)
def test_images_of_any_size_and_number_of_channels_give_one_logit_per_class(name):
    for channels, height, width in ((1, 28, 28), (3, 8, 8), (2, 17, 40)):
        with torch.device("meta"):  # shapes without arithmetic
            logits = MODELS[name](num_classes=7, in_channels=channels)(torch.empty(4, channels, height, width))
        assert logits.shape == (4, 7) and logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("image_size", "small_images", "side"), [(224, True, 16), (32, False, 4), (64, None, 16), (65, None, 4)]
)
def test_only_the_first_layer_for_small_images_keeps_the_resolution(image_size, small_images, side):
    model = resnets.resnet("resnet18", 10, 3, image_size, small_images)
    seen = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    with torch.no_grad():
        model(torch.randn(2, 3, 16, 16))
    assert seen == [(2, 64, side, side)]
