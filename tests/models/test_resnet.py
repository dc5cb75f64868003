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


def test_a_misspelt_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        ValueError, match=r"no ResNet named 'resnet81': did you mean resnet18\? it is one of .*resnet34"
    ):
        resnets.resnet("resnet81", num_classes=10, in_channels=3, small_images=False)


def test_a_name_unlike_any_other_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"no ResNet named 'vit': it is one of resnet101, .*resnet50"):
        resnets.resnet("vit", num_classes=10, in_channels=3, small_images=False)
