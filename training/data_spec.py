"""DataSpec: what a checkpoint says about the data, so that a network can be used where its training data are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.crops import CroppedDataset
from training.config import ConfigError


@dataclass(frozen=True)
class DataSpec:
    """How an image becomes a network's input, and the names of its outputs.

    shape: height and width in pixels, channels. mean, std: of each channel, for pixels scaled to 0..1. test_crop: the
    share of a test image's shorter side that is shown (data.crops); None for images that had their size already.
    """

    shape: Sequence[int]
    mean: Sequence[float]
    std: Sequence[float]
    classes: Sequence[str]
    interpolation: str = "bilinear"
    test_crop: float | None = None

    @classmethod
    def of(cls, dataset: Any, mean: Sequence[float], std: Sequence[float]) -> DataSpec:
        shape, classes = dataset.sample_spec()["image"][0], [str(name) for name in dataset.classes]
        crop = getattr(dataset, "test_crop", 224 / 256) if isinstance(dataset, CroppedDataset) else None
        interpolation = getattr(dataset, "interpolation", "bilinear")
        return cls(list(shape), list(mean), list(std), classes, interpolation, crop)

    def fill(self, section: dict[str, Any]) -> dict[str, Any]:
        """The section `data`, its null keys filled in with the values that the network was trained with."""
        known = {"image_size": self.shape[0], "interpolation": self.interpolation, "test_crop": self.test_crop}
        return {key: known.get(key) if value is None else value for key, value in section.items()}

    def check(self, dataset: Any) -> None:
        """Raises ConfigError unless the dataset has the classes and the images that the network knows."""
        theirs = [str(name) for name in dataset.classes]
        if theirs != list(self.classes):
            pairs = zip([*self.classes, "none"], [*theirs, "none"], strict=False)
            ours, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ConfigError(
                f"the run's network knows {len(self.classes)} classes, and these data have {len(theirs)}; the first "
                f"that differs is {ours} in the run and {other} in the data: choose data with the run's classes"
            )
        shape = dataset.sample_spec()["image"][0]
        if list(shape) != list(self.shape):
            raise ConfigError(
                f"the run's network takes images of (height, width, channels) {tuple(self.shape)} and these data have "
                f"{tuple(shape)}: set data.image_size, or choose other data"
            )
