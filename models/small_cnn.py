"""SmallCNN: a network for small images, which trains in a minute on two CPU cores."""

import torch
from torch import nn


class SmallCNN(nn.Module):
    """Takes float images (B, in_channels, H, W) with H and W at least 8, returns logits (B, num_classes).

    width: channels of the first convolution; later ones have 2, 4 and 8 times as many. Multiples of 16 are fast on a
    CPU. Raises ValueError if it is less than 1.

    The architecture follows the short residual networks for fast training on CIFAR-10: David Page's ResNet-9
    (DAWNBench, "How to train your ResNet") and Keller Jordan's airbench (arXiv:2404.00498). It has fewer channels, and
    pools before a convolution adds channels, not after it: that convolution then costs a quarter. In front of the last
    layer, averaging over positions generalised better than taking their maximum.
    """

    def __init__(self, num_classes: int, in_channels: int, width: int = 16) -> None:
        if width < 1:
            raise ValueError(f"width={width}: give a whole number, at least 1")
        super().__init__()
        layers = [convolution(in_channels, width), nn.MaxPool2d(2)]
        for _ in range(2):
            layers += [convolution(width, 2 * width), Residual(2 * width), nn.MaxPool2d(2)]
            width *= 2
        layers.append(convolution(width, 2 * width))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).mean(dim=(2, 3)))


class Residual(nn.Module):
    """A convolution whose result is added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = convolution(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.convolution(x)


def convolution(in_channels: int, out_channels: int) -> nn.Sequential:
    """A 3x3 convolution that keeps the resolution, then batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
