"""models/linear.py: any size of image, and learning."""

import pytest
import torch
from torch.nn import functional as F

from models.linear import linear


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 8, 8), (2, 17, 40)])
def test_images_of_any_size_give_one_logit_per_class(shape: tuple[int, int, int]) -> None:
    logits = linear(num_classes=7, in_channels=shape[0])(torch.randn(4, *shape))
    assert logits.shape == (4, 7) and logits.dtype == torch.float32


def test_a_few_steps_lower_the_loss_on_one_batch() -> None:
    torch.manual_seed(0)
    model = linear(num_classes=10, in_channels=1)
    images, labels = torch.randn(16, 1, 28, 28), torch.randint(10, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
