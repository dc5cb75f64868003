"""models/resnet.py: the two first layers, the error messages; what every network promises is in test_models.py."""

import pytest
import torch
from later import Later

resnets = Later("models.resnet")


@pytest.mark.parametrize(
    ("image_size", "small_images", "side"), [(224, True, 16), (32, False, 4), (64, None, 16), (65, None, 4)]
)
def test_only_the_first_layer_for_small_images_keeps_the_resolution(
    image_size: int, small_images: bool | None, side: int
) -> None:
    model = resnets.resnet("resnet18", 10, 3, image_size, small_images)
    seen = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    with torch.no_grad():
        model(torch.randn(2, 3, 16, 16))
    assert seen == [(2, 64, side, side)]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnet81", r"'resnet81': did you mean resnet18\? it is one of .*resnet34"),
        ("vit", r"'vit': it is one of resnet101, .*resnet50"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion_or_the_list(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"no ResNet named {sentence}"):
        resnets.resnet(name, num_classes=10, in_channels=3, small_images=False)
