"""torchvision's ResNets, randomly initialised, with a first layer that fits the images' size."""

import torchvision
from torch import nn

SMALL = 64  # pixels: the largest side of small images


def resnet(
    name: str, num_classes: int, in_channels: int, image_size: int = 224, small_images: bool | None = None
) -> nn.Module:
    """A ResNet (He et al., arXiv:1512.03385). It takes float images (B, in_channels, H, W) and returns logits.

    name: one of torchvision's, such as resnet18, resnet50, resnext50_32x4d or wide_resnet50_2.
    image_size: side of the images in pixels.
    small_images: True makes the first layer a 3x3 convolution that keeps the resolution, as in that paper's CIFAR
        networks. False makes it a 7x7 convolution and a max-pool, which divide it by 4. None: True up to 64 pixels.
    """
    model = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    width = model.conv1.out_channels
    if small_images is None:
        small_images = image_size <= SMALL
    if small_images:
        model.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        model.conv1 = nn.Conv2d(in_channels, width, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
