"""DataSpec: what a checkpoint stores about the training data, so that its network can be used without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.images.crops import CroppedDataset
from training.config import ConfigError


@dataclass(frozen=True)
class DataSpec:
    """How a sample becomes a network's input, the arguments that the network was built with, and its classes.

    model_options: num_classes, in_channels, image_size. shape: (height, width, channels) of an image, in pixels; None
    for samples without images. mean, std: of each channel, for pixels scaled to 0..1; None if images are not
    normalised. images: the fields that are normalised. test_crop: side of a test image's center crop, as a share of
    its shorter side; None for images that are not cropped.
    """

    model_options: dict[str, int]
    classes: Sequence[str]
    shape: Sequence[int] | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    interpolation: str = "bilinear"
    test_crop: float | None = None
    images: Sequence[str] = ("image",)

    @classmethod
    def of(
        cls, dataset: Any, shape: Sequence[int] | None, mean: Any, std: Any, model_options: dict[str, int]
    ) -> DataSpec:
        """Describes the training set `dataset`."""
        classes = [str(name) for name in getattr(dataset, "classes", ())]
        if shape is None:
            return cls(model_options, classes)
        mean, std = (None if values is None else [float(value) for value in values] for values in (mean, std))
        crop: dict[str, Any] = {}
        if isinstance(dataset, CroppedDataset):
            crop = {"interpolation": dataset.interpolation, "test_crop": float(dataset.test_crop)}
        return cls(model_options, classes, list(shape), mean, std, **crop)

    def image_shape(self, what: str) -> tuple[int, int, int]:
        """An image's shape (H, W, C). Raises ConfigError, which names `what`, if the network takes no uint8 images."""
        if self.shape is None or self.mean is None:
            raise ConfigError(f"{what} needs a network that was trained on uint8 images, and this one was not")
        height, width, channels = self.shape
        return height, width, channels

    def fill(self, section: dict[str, Any]) -> dict[str, Any]:
        """Returns the section `data`; where it has null, it gets the value that the network was trained with."""
        trained_with = {
            "image_size": self.shape and self.shape[0],
            "interpolation": self.interpolation,
            "test_crop": self.test_crop,
        }
        return {key: trained_with.get(key) if value is None else value for key, value in section.items()}

    def check(self, dataset: Any) -> None:
        """Raises ConfigError unless the dataset has the classes and the image shape of the training set."""
        self.check_classes(dataset, "these data have")
        if self.shape is None or not callable(getattr(dataset, "sample_spec", None)):
            return
        shape = dataset.sample_spec()["image"][0]
        if list(shape) != list(self.shape):
            raise ConfigError(
                f"the run's network takes images of (height, width, channels) {tuple(self.shape)} and these data have "
                f"{tuple(shape)}: set data.image_size, or choose other data"
            )

    def check_classes(self, dataset: Any, others_have: str) -> None:
        """Raises ConfigError unless the dataset has the classes of the training set, in the same order."""
        theirs = [str(name) for name in getattr(dataset, "classes", ())]
        if theirs != list(self.classes):
            pairs = zip([*self.classes, "none"], [*theirs, "none"], strict=False)
            ours, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ConfigError(
                f"the run's network knows {len(self.classes)} classes, and {others_have} {len(theirs)}; the first "
                f"that differs is {ours} in the training set, and {other} in the other: both need the same classes, "
                "in the same order"
            )
