"""BatchTransform: augment.transform, called with a whole batch of images on the device, before they are normalised.

Invariant: a transform gets floats in 0 to 1, (B, C, H, W), and what it returns is normalised: it never gets normalised
images, and nothing is normalised twice. It gets new memory, so it may change it in place.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from data.errors import DataError
from data.own_transform import name_of
from data.transform import Normalize

log = logging.getLogger(__name__)

SLACK = 0.1  # how far pixels may be out of 0 to 1, as those of some interpolations are, without a warning


class BatchTransform:
    """Calls the transforms with the images, and with the labels if they take them; then normalises the images.

    It draws from torch's global generators, so a Preloader has to call it as `finish`, which seeds them.
    label: the name of the field with the labels, or None.
    """

    def __init__(self, steps: Sequence[Callable[..., Any]], normalize: Normalize, label: str | None) -> None:
        (self.image,) = normalize.fields
        channels = len(normalize.mean)
        self.steps = [(step, label is not None and takes_labels(step)) for step in steps]
        self.normalize = normalize
        self.label = label
        self._to_floats = Normalize([0.0] * channels, [1.0] * channels, normalize.dtype, normalize.fields)
        self._has_run = False

    def __call__(self, batch: dict[str, Any], random: Any = None) -> dict[str, Any]:
        batch = self._to_floats(batch)
        images = batch[self.image]
        count = len(images)
        labels = None
        if self.label is not None:
            labels = batch[self.label].clone()
        for step, with_labels in self.steps:
            if with_labels:
                images, labels = step(images, labels)
            else:
                images = step(images)
            self._check(step, images, count)
        self._has_run = True
        constants = self.normalize.constants(images.device, width=1)
        shift, scale = (values[:, None, None] for values in constants)
        batch[self.image] = torch.addcmul(shift, images, 255 * scale).to(self.normalize.dtype)
        if self.label is not None:
            batch[self.label] = labels
        return batch

    def _check(self, step: Any, images: Any, count: int) -> None:
        is_tensor = isinstance(images, torch.Tensor)
        if not is_tensor or images.ndim != 4 or len(images) != count or not images.is_floating_point():
            form = f"{images.dtype} {tuple(images.shape)}" if is_tensor else type(images).__name__
            raise DataError(
                f"augment.transform: {name_of(step)} returned {form}: it must return the {count} images, floats "
                "(B, C, H, W); with a parameter `labels` it gets the labels, and returns (images, labels)"
            )
        if not self._has_run:  # later the host must not wait for the device
            least = images.min().item()
            most = images.max().item()
            if least < -SLACK or most > 1 + SLACK:
                log.warning(
                    "augment.transform: %s returned pixels from %.2f to %.2f: it gets 0 to 1, and the images are "
                    "normalised after it, so leave out its own normalisation",
                    name_of(step),
                    least,
                    most,
                )


def takes_labels(step: Callable[..., Any]) -> bool:
    """Whether it has a parameter `labels`, or is from torchvision's v2, which passes labels on."""
    if type(step).__module__.startswith("torchvision.transforms.v2"):
        return True
    call = step.forward if isinstance(step, nn.Module) else step
    try:
        return "labels" in inspect.signature(call).parameters
    except ValueError:  # some builtins have no signature
        return False
