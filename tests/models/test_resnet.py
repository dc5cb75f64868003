"""models/resnet.py: shapes, the two first layers, the error message."""

import pytest
import torch
from torch.nn import functional as F

from models.resnet import resnet


@pytest.mark.parametrize(
    ("name", "channels", "small_images"),
    [("resnet18", 1, True), ("resnet18", 3, False), ("resnet50", 4, False)],
)
def test_images_with_any_number_of_channels_give_one_logit_per_class(
    name: str, channels: int, small_images: bool
) -> None:
    model = resnet(name, num_classes=7, in_channels=channels, small_images=small_images).eval()
    with torch.no_grad():
        assert model(torch.randn(2, channels, 16, 16)).shape == (2, 7)


@pytest.mark.parametrize(("small_images", "side"), [(True, 16), (False, 4)])
def test_only_the_first_layer_for_small_images_keeps_the_resolution(small_images: bool, side: int) -> None:
    model = resnet("resnet18", num_classes=10, in_channels=3, small_images=small_images)
    seen = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    with torch.no_grad():
        model(torch.randn(2, 3, 16, 16))
    assert seen == [(2, 64, side, side)]


def test_a_few_steps_lower_the_loss_on_one_batch() -> None:
    torch.manual_seed(0)
    model = resnet("resnet18", num_classes=10, in_channels=1, small_images=True)
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(6):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_channels_last_memory_gives_the_same_logits() -> None:
    model = resnet("resnet18", num_classes=10, in_channels=3, small_images=True).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(images)
        model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
        torch.testing.assert_close(model(images), expected, rtol=1e-3, atol=1e-3)


def test_a_misspelt_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        ValueError, match=r"no ResNet named 'resnet81': did you mean resnet18\? it is one of .*resnet34"
    ):
        resnet("resnet81", num_classes=10, in_channels=3, small_images=False)


def test_a_name_unlike_any_other_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"no ResNet named 'vit': it is one of resnet101, .*resnet50"):
        resnet("vit", num_classes=10, in_channels=3, small_images=False)
