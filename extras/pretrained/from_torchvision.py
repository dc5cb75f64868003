"""Any of torchvision's networks for classification, randomly initialised or pretrained: model=torchvision."""

from typing import Any

import torch
from torch import nn
from torchvision import models

from extras.pretrained.pretrained import Preprocessing, downloading, with_channels

# The weights of these networks expect images normalised with these numbers. With transform_input the network would
# convert images that are normalised as for ImageNet.
INCEPTION = ("googlenet", "inception_v3")
INCEPTION_MEAN = INCEPTION_STD = (0.5, 0.5, 0.5)


def from_torchvision(
    name: str, pretrained: bool, num_classes: int, in_channels: int, image_size: int = 224
) -> nn.Module:
    """A network that takes float images (B, in_channels, H, W) and returns logits (B, num_classes).

    name: such as resnet50, convnext_tiny or vit_b_16.
    pretrained: loads torchvision's best weights. The last layer is new, unless there are 1,000 classes. For images
        without three channels, `with_channels` converts the weights of the first layer.
    image_size: only vit_* and maxvit_t need it.
    googlenet and inception_v3 are trained without their auxiliary outputs, and do not normalise images themselves.
    Raises ValueError for an unknown name and for weights that cannot be downloaded.
    """
    weights: Any = models.get_model_weights(name).DEFAULT  # the best ones
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options["image_size"] = image_size
    elif name.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    elif name in INCEPTION:
        options.update(init_weights=not pretrained, transform_input=False)
    if pretrained:
        by_hand = f"put {weights.url} into {torch.hub.get_dir()}/checkpoints, or set model.pretrained=false"
        with downloading(str(weights), by_hand):
            model = models.get_model(name, weights=weights, **options)
        if num_classes != len(weights.meta["categories"]):
            replace_head(model, num_classes)
    else:
        model = models.get_model(name, weights=None, num_classes=num_classes, **options)

    if hasattr(model, "aux_logits"):  # with them, the output in training is a tuple
        model.aux_logits = False
        model.aux1 = model.aux2 = model.AuxLogits = None
    if in_channels != 3:
        first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        weight = with_channels(first.weight.detach(), in_channels)
        first.in_channels = in_channels
        first.weight = nn.Parameter(weight)
    return model


def preprocessing(name: str, pretrained: bool) -> Preprocessing:
    """How the network expects its images: for a network without pretrained weights, only their size."""
    theirs: Any = models.get_model_weights(name).DEFAULT.transforms()
    size = theirs.crop_size[0]
    if not pretrained:
        return Preprocessing(size)
    mean, std = (INCEPTION_MEAN, INCEPTION_STD) if name in INCEPTION else (tuple(theirs.mean), tuple(theirs.std))
    return Preprocessing(size, theirs.interpolation.value, size / theirs.resize_size[0], mean, std)


from_torchvision.preprocessing = preprocessing  # type: ignore[attr-defined]  # training/preprocessing.py looks for it


def replace_head(model: nn.Module, num_classes: int) -> None:
    """Gives the network a new last layer, a linear one or (in squeezenet) a convolution."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    name, head = layers[-1]
    if isinstance(head, nn.Linear):
        model.set_submodule(name, nn.Linear(head.in_features, num_classes, head.bias is not None))
    else:
        model.set_submodule(name, nn.Conv2d(head.in_channels, num_classes, kernel_size=1))
