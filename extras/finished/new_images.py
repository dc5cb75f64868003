"""NewImages: what a checkpoint says by values of the images that its network takes, so that no dataset is built."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from data.array_dataset import resized_middle
from data.batch_transform import Normalize
from data.errors import DataError
from data.images.crops import LONGEST_SIDE, CroppedDataset
from training.config import Config
from training.datasets import Datasets, build_task, numbers_by_class
from training.preprocessing import OnNamed, sizes_of
from training.tasks import Batch

Values = dict[str, Any]  # what a checkpoint says of its images, by name


class NewImages(Datasets):
    """What a network needs of Datasets to predict for new images. It has no `train`, `val` and `test`.

    new_images, classes: as the checkpoint has them, and the weights. Raises DataError or AttributeError if the task
        needs more.
    """

    def __init__(self, config: Config, new_images: Values, classes: list[str] | None) -> None:
        self.weights = None
        self.new_images = new_images
        self.classes = classes
        self.prepare = prepare_by(new_images["prepared_by"])
        # What training counts in the labels is not needed now, and there are none.
        section = {key: None if value == "balanced" else value for key, value in config.task.items()}
        section = numbers_by_class("task", section, classes, classes) if classes else section
        self.task = build_task(section, SimpleNamespace(classes=classes))
        if len(self.task.inputs) != 1:
            raise DataError(f"the network needs {', '.join(self.task.inputs)}, and new images are one field")
        self.normalize = Normalize(new_images["mean"], new_images["std"], fields=self.task.inputs)
        self.transform = OnNamed(self.normalize, self.task)
        self.first = self.batch(2)
        self.model_options = {"num_classes": self.task.num_outputs, **sizes_of(self.first[self.task.inputs[0]])}

    @property
    def channels(self) -> int:
        return len(self.new_images["mean"])

    def batch(self, samples: int) -> Batch:
        """Samples of noise, as the dataset would make them of images."""
        random = np.random.default_rng(0)
        images = [random.integers(256, size=(96, 128, self.channels), dtype=np.uint8) for _ in range(samples)]
        prepared = torch.stack([torch.as_tensor(self.prepare(image)) for image in images])
        labels = {} if self.task.label is None else {self.task.label: None}
        return {self.task.inputs[0]: prepared, **labels}


def prepare_by(values: Values) -> Callable[[np.ndarray], Any]:
    """The `prepare` of a dataset: see ImageDataset.prepared_by."""
    if "image_shape" in values:
        height, width, _ = values["image_shape"]
        return partial(resized_middle, height=height, width=width)
    return crops_of(values).prepare


def crops_of(values: Values) -> CroppedDataset:
    """A dataset without samples that prepares images by these values."""
    options = {key: value for key, value in values.items() if key != "stored_as"}
    dataset = CroppedDataset(False, **options)
    dataset.stored_as = values["stored_as"]
    return dataset


# How each step of `described` is done with an image of `width` and `height` pixels, w and h in short.
HOW = {
    "shrink": "if min(w, h) is more than shorter_side, resize to (w * shorter_side // min(w, h), h * shorter_side // "
    "min(w, h))",
    "limit_ratio": "cut max(0, w - ratio * min(w, h)) // 2 columns off the left and off the right, and so for rows",
    "resize_shorter_side": "resize to (w * shorter_side // min(w, h), h * shorter_side // min(w, h))",
    "center_crop": "cut (width, height) out at left = round((w - width) / 2), top = round((h - height) / 2), where a "
    "half is rounded to the even number",
    "crop_to_ratio": "cut (min(w, round(h * width / height)), min(h, round(w / (width / height)))) out of the middle, "
    "at left and top that are rounded down",
    "resize": "resize to (width, height)",
}


def described(new_images: Values) -> Values:
    """How to make the network's input of an image, in words and numbers for any program. See HOW."""
    values = new_images["prepared_by"]
    return {
        "image": "the upright image (its EXIF orientation is applied), 8 bits per channel, without alpha",
        "mode": "L" if len(new_images["mean"]) == 1 else "RGB",
        "steps": None if values is None else [{**step, "how": HOW[step["step"]]} for step in steps_of(values)],
        "resize": "antialiased, as Image.resize of Pillow does it: pixels then differ by 1 or 2 of 255 at most, or by "
        "more where bicubic leaves 0 to 255",
        "then": "divide by 255, subtract mean, divide by std, put the channels first: float32 (batch, C, H, W)",
        "mean": list(new_images["mean"]),
        "std": list(new_images["std"]),
    }


def steps_of(values: Values) -> list[Values]:
    """What the `prepare` with these values does, in order."""
    if "image_shape" in values:
        height, width, _ = values["image_shape"]
        size = {"width": width, "height": height}
        return [{"step": "crop_to_ratio", **size}, {"step": "resize", **size, "interpolation": "bilinear"}]
    side = values["image_size"]
    shorter = crops_of(values).shorter_side
    steps: list[Values] = [
        {"step": "limit_ratio", "ratio": LONGEST_SIDE},
        {"step": "resize_shorter_side", "shorter_side": shorter, "interpolation": values["interpolation"]},
        {"step": "center_crop", "width": side, "height": side},
    ]
    stored_side, stored_by = values["stored_as"]
    if stored_side is not None:
        steps.insert(0, {"step": "shrink", "shorter_side": stored_side, "interpolation": stored_by})
    return steps
