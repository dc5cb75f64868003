"""A linear classifier: its step costs so little that the loader decides how fast training is."""

from torch import nn


def linear(num_classes: int, in_channels: int, size: int = 14) -> nn.Sequential:
    """Takes float images (B, in_channels, H, W) of any size, returns logits (B, num_classes).

    size: side in pixels to which an image is reduced by averaging.
    """
    inputs = in_channels * size * size
    return nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Flatten(), nn.Linear(inputs, num_classes))
