"""What every network of models/ promises: shapes, learning, memory layout."""

from itertools import product

import pytest
import torch
from later import Later
from torch.nn import functional as F

from models.linear import linear
from models.small_cnn import SmallCNN

resnets = Later("models.resnet")
MODELS = {
    "linear": linear,
    "small_cnn": SmallCNN,
    "resnet18": lambda **options: resnets.resnet("resnet18", small_images=True, **options),
    "resnet50": lambda **options: resnets.resnet("resnet50", small_images=False, **options),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *product(["linear", "small_cnn"], [(1, 28, 28), (3, 32, 32), (3, 8, 8), (2, 17, 40)]),
        ("resnet18", (1, 16, 16)),
        ("resnet18", (3, 17, 24)),
        ("resnet50", (4, 16, 16)),
    ],
)
def test_images_of_any_size_and_number_of_channels_give_one_logit_per_class(name, shape):
    model = MODELS[name](num_classes=7, in_channels=shape[0]).eval()
    with torch.no_grad():
        logits = model(torch.randn(4, *shape))
    assert logits.shape == (4, 7) and logits.dtype == torch.float32


@pytest.mark.parametrize(("name", "lr", "steps"), [("linear", 0.1, 20), ("small_cnn", 0.1, 20), ("resnet18", 0.02, 6)])
def test_a_few_steps_lower_the_loss_on_one_batch(name, lr, steps):
    torch.manual_seed(0)
    model = MODELS[name](num_classes=10, in_channels=1)
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["small_cnn", "resnet18"])
def test_channels_last_memory_gives_the_same_logits(name):
    model = MODELS[name](num_classes=10, in_channels=3).eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(images)
        model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
        torch.testing.assert_close(model(images), expected, rtol=1e-3, atol=1e-3)
