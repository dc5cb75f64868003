"""DataSpec: what a checkpoint stores about the training data, so that its network can be used without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from data.images.stream import CroppedStream
from data.samples import Samples
from data.subset import Subset
from training.config import ConfigError

WRAPPERS = (Samples, Subset, CroppedStream, torch.utils.data.Subset)  # their `dataset` makes their samples
PLAIN_TYPES = {str, int, float, bool, type(None)}
MOST_VALUES = 100  # in an attribute that is stored: longer lists are data


@dataclass(frozen=True)
class DataSpec:
    """How a sample becomes a network's input, the arguments that the network was built with, and its classes.

    model_options: num_classes, in_channels, image_size. shape: (height, width, channels) of an image, in pixels; None
    for samples without images. mean, std: of each channel, for pixels scaled to 0..1; None if images are not
    normalised. images: the names of the fields that are. dataset: with it, training/finished/prepare.py
    calls the test set's `prepare` without its data: the class as "_target_", the "attributes" that are numbers, texts
    or short lists, and the names of the "others".
    """

    model_options: dict[str, int]
    classes: Sequence[str]
    dataset: dict[str, Any]
    shape: Sequence[int] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    images: Sequence[str]

    def fill(self, section: dict[str, Any]) -> dict[str, Any]:
        """Returns the section `data`; where it has null, it gets the value that the network was trained with."""
        attributes = self.dataset["attributes"]
        trained_with = {"image_size": self.shape and self.shape[0]}
        trained_with |= {key: attributes.get(key) for key in ("interpolation", "test_crop")}
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
            pairs = zip_longest(self.classes, theirs, fillvalue="none")
            ours, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ConfigError(
                f"the run's network knows {len(self.classes)} classes, and {others_have} {len(theirs)}; the first "
                f"that differs is {ours} in the training set, and {other} in the other: both need the same classes, "
                "in the same order"
            )


def stored(dataset: Any) -> dict[str, Any]:
    """What a checkpoint stores about the dataset inside of WRAPPERS: its class, and its attributes (see DataSpec)."""
    while isinstance(dataset, WRAPPERS):
        dataset = dataset.dataset
    kind, plain, others = type(dataset), {}, []
    for name, value in vars(dataset).items():
        parts = value if isinstance(value, list | tuple) else [value]
        if len(parts) <= MOST_VALUES and PLAIN_TYPES.issuperset(map(type, parts)):
            plain[name] = value
        else:
            others.append(name)
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", "attributes": plain, "others": others}
