"""torchvision's ResNets, randomly initialised, with an optional first layer for small images."""

from difflib import get_close_matches

import torchvision
from torch import nn


def resnet(name: str, num_classes: int, in_channels: int, small_images: bool) -> nn.Module:
    """A ResNet (He et al., arXiv:1512.03385). It takes float images (B, in_channels, H, W) and returns logits.

    name: one of torchvision's, such as resnet18, resnet50, resnext50_32x4d or wide_resnet50_2.
    small_images: for images of about 64 pixels or less. The first layer is a 3x3 convolution that keeps the
        resolution, as in that paper's CIFAR networks, instead of a 7x7 one and a max-pool, which divide it by 4.
    Raises ValueError for an unknown name.
    """
    known = torchvision.models.list_models(module=torchvision.models, include="*resne*")
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"there is no ResNet named {name!r}: {hint}it is one of {', '.join(known)}")

    model = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    width = model.conv1.out_channels
    if small_images:
        model.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        model.conv1 = nn.Conv2d(in_channels, width, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
