"""models/small_cnn.py: shapes, learning, memory layout."""

import pytest
import torch
from torch.nn import functional as F

from models.small_cnn import SmallCNN


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 8, 8), (2, 17, 40)])
def test_images_of_any_size_give_one_logit_per_class(shape: tuple[int, int, int]) -> None:
    model = SmallCNN(num_classes=7, in_channels=shape[0])
    logits = model(torch.randn(4, *shape))
    assert logits.shape == (4, 7) and logits.dtype == torch.float32


def test_width_sets_the_number_of_channels() -> None:
    narrow, wide = (SmallCNN(num_classes=10, in_channels=1, width=width) for width in (8, 32))
    assert narrow.classifier.in_features == 64
    assert wide.classifier.in_features == 256


def test_a_few_steps_lower_the_loss_on_one_batch() -> None:
    torch.manual_seed(0)
    model = SmallCNN(num_classes=10, in_channels=1)
    images, labels = torch.randn(16, 1, 16, 16), torch.randint(10, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_width_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="width=0: give a number from 1"):
        SmallCNN(num_classes=10, in_channels=1, width=0)


def test_every_parameter_gets_a_gradient() -> None:
    model = SmallCNN(num_classes=10, in_channels=3)
    F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8)).backward()
    without = [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0]
    assert without == []


def test_channels_last_memory_gives_the_same_logits() -> None:
    model = SmallCNN(num_classes=10, in_channels=3).eval()
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
        assert model.features(images).is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
