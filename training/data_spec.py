"""DataSpec: what a checkpoint says about the data, so that a network can be used where its training data are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.crops import CroppedDataset
from training.config import ConfigError


@dataclass(frozen=True)
class DataSpec:
    """How a sample becomes a network's input, what the network was built with, and the names of its outputs.

    model_options: see Sets. shape: an image's height and width in pixels, channels; None for samples without images.
    mean, std: of each channel, for pixels scaled to 0..1; None if images are not normalised. test_crop: the share of a
    test image's shorter side that is shown (data.crops); None for images that had their size already.
    """

    model_options: dict[str, int]
    classes: Sequence[str]
    shape: Sequence[int] | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    interpolation: str = "bilinear"
    test_crop: float | None = None

    @classmethod
    def of(cls, dataset: Any, image: Tensor | None, mean: Any, std: Any, model_options: dict[str, int]) -> DataSpec:
        """image: the first images (B, H, W, C), or floats (B, C, H, W), if the dataset has any."""
        classes = [str(name) for name in getattr(dataset, "classes", ())]
        if image is None:
            return cls(model_options, classes)
        shape = image.shape[1:] if image.dtype == torch.uint8 else (*image.shape[2:], image.shape[1])
        mean, std = (None if values is None else [float(value) for value in values] for values in (mean, std))
        crop: dict[str, Any] = {}
        if isinstance(dataset, CroppedDataset):
            crop = {"interpolation": dataset.interpolation, "test_crop": float(dataset.test_crop)}
        return cls(model_options, classes, list(shape), mean, std, **crop)

    def image_shape(self, what: str) -> tuple[int, int, int]:
        """An image's shape (H, W, C). Raises ConfigError unless the network takes images as bytes, as `what` needs."""
        if self.shape is None or self.mean is None:
            raise ConfigError(f"{what} needs a network of images that are read as bytes, which this one is not")
        height, width, channels = self.shape
        return height, width, channels

    def fill(self, section: dict[str, Any]) -> dict[str, Any]:
        """The section `data`, its null keys filled in with the values that the network was trained with."""
        known = {
            "image_size": self.shape and self.shape[0],
            "interpolation": self.interpolation,
            "test_crop": self.test_crop,
        }
        return {key: known.get(key) if value is None else value for key, value in section.items()}

    def check(self, dataset: Any) -> None:
        """Raises ConfigError unless the dataset has the classes and the images that the network knows."""
        theirs = [str(name) for name in getattr(dataset, "classes", ())]
        if theirs != list(self.classes):
            pairs = zip([*self.classes, "none"], [*theirs, "none"], strict=False)
            ours, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ConfigError(
                f"the run's network knows {len(self.classes)} classes, and these data have {len(theirs)}; the first "
                f"that differs is {ours} in the run and {other} in the data: choose data with the run's classes"
            )
        if self.shape is None or not callable(getattr(dataset, "sample_spec", None)):
            return
        shape = dataset.sample_spec()["image"][0]
        if list(shape) != list(self.shape):
            raise ConfigError(
                f"the run's network takes images of (height, width, channels) {tuple(self.shape)} and these data have "
                f"{tuple(shape)}: set data.image_size, or choose other data"
            )
