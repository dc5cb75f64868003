"""OwnTransform: what data.transform and data.test_transform name, called with one image at a time.

Transformed: the base class of image datasets, whose constructor takes these keys.
Invariant: whatever a transform takes and returns, a sample's image is uint8 (H, W, C), which is normalised later, or
float32 (C, H, W), which the network gets as it is.
"""

from typing import Any

import numpy as np
import torch

from data.errors import DataError, check_choice

INPUTS = ("tensor", "array")
PLACES = ("decode", "crop")


class OwnTransform:
    """Calls one transform after the other.

    steps: each gets a uint8 tensor (C, H, W) or, if it is from albumentations or `takes` is "array", an array (H, W,
    C). Arrays and Pillow images that a step returns have their channels last, tensors first. key: for errors.
    after: "decode" if the steps get whole images, "crop" if they get the dataset's own crops.
    """

    def __init__(self, key: str, steps: Any, takes: str | None, after: str) -> None:
        self.key = key
        self.takes = takes
        self.after = after
        self.steps = list(steps) if isinstance(steps, (list, tuple)) else [steps]
        for step in self.steps:
            if not callable(step) or isinstance(step, type):
                target = "{_target_: MODULE.NAME}"
                raise DataError(f"{key}={step}: give {target}, a class, or a function that returns a transform")

    def __call__(self, image: torch.Tensor, name: str) -> torch.Tensor:
        """Transforms a uint8 image (C, H, W). Raises DataError with its name if the result is not an image."""
        pixels: Any = image
        for step in self.steps:
            try:
                pixels = self._called(step, pixels)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                sentence = f"{self.key}: {name_of(step)} failed for {name}, {form_of(as_tensor(pixels))}: {reason}"
                raise DataError(f"{sentence}; the traceback is in train.log") from error
        return self._checked(as_tensor(pixels), len(image), name)

    def _called(self, step: Any, pixels: Any) -> Any:
        if is_of_albumentations(step):
            return step(image=as_array(pixels))["image"]
        return step(as_array(pixels) if self.takes == "array" else as_tensor(pixels))

    def _checked(self, pixels: Any, channels: int, name: str) -> torch.Tensor:
        made = f"{self.key} returned {form_of(pixels)} for {name}"
        if not isinstance(pixels, torch.Tensor) or pixels.ndim != 3:
            raise DataError(f"{made}: it must return an image, a tensor (C, H, W) or an array (H, W, C)")
        is_uint8 = pixels.dtype == torch.uint8
        if len(pixels) != channels and (is_uint8 or pixels.shape[2] == channels):
            raise DataError(
                f"{made}, which has {channels} channels: return tensors (C, H, W), or arrays (H, W, C); "
                "data.transform_input=array if it takes these"
            )
        if is_uint8:
            return pixels.permute(1, 2, 0).contiguous()
        if not pixels.is_floating_point():
            raise DataError(f"{made}: return uint8, 0 to 255, or floats, which the network gets as they are")
        return pixels.float().contiguous()


class Transformed:
    """Takes the keys that all our datasets have: the transforms, and stratify, see data.subset.split.

    policy: "trivial" or "rand": training samples go through torchvision's TrivialAugmentWide (Müller and Hutter,
    arXiv:2103.10158) or RandAugment (Cubuk et al., arXiv:1909.13719), after the crop and before `transform`.

    A subclass calls the attribute `transform`, if it is not None, in `__getitem__`: it is for this dataset's samples.
    The attribute `test_transform` is for test samples and new images.
    """

    transform: OwnTransform | None
    read_batch: Any

    def __init__(
        self,
        train: bool,
        transform: Any = None,
        test_transform: Any = None,
        transform_input: str | None = None,
        transform_after: str = "decode",
        policy: str | None = None,
        stratify: bool = False,
    ) -> None:
        self.stratify = stratify
        check_choice("data.transform_after", transform_after, PLACES)
        if transform_input is not None:
            check_choice("data.transform_input", transform_input, INPUTS)
        self.test_transform = training_transform = None
        if test_transform:
            self.test_transform = OwnTransform("data.test_transform", test_transform, transform_input, transform_after)
        if transform:
            training_transform = OwnTransform("data.transform", transform, transform_input, transform_after)
        if policy is not None:
            training_transform = training_transform or OwnTransform("data.policy", [], None, "crop")
            if training_transform.after == "decode":
                raise DataError(
                    f"data.policy={policy} needs the crop that data.transform replaces: "
                    "set data.policy=null, or data.transform_after=crop"
                )
            training_transform.steps.insert(0, Policy(policy))
        self.use_transform(training_transform if train else self.test_transform)

    @property
    def gets_whole_images(self) -> bool:
        """Whether the transform replaces the dataset's own crop."""
        return self.transform is not None and self.transform.after == "decode"

    def use_transform(self, transform: OwnTransform | None) -> None:
        """With a transform, a loader reads the samples one by one, because it seeds the generators for each."""
        self.transform = transform
        switch(self, "read_batch", transform is None)


class Policy:
    """torchvision's TrivialAugmentWide ("trivial") or RandAugment ("rand"), as a step of an OwnTransform."""

    def __init__(self, name: str) -> None:
        check_choice("data.policy", name, ("trivial", "rand"))
        # Imported here, because it takes a second in every worker that is spawned.
        from torchvision.transforms import InterpolationMode, v2

        kind = {"trivial": v2.TrivialAugmentWide, "rand": v2.RandAugment}[name]
        self._transform = kind(interpolation=InterpolationMode.BILINEAR)

    def __call__(self, image: Any) -> torch.Tensor:
        augmented: torch.Tensor = self._transform(as_tensor(image))
        return augmented


def switch(dataset: Any, method: str, is_on: bool) -> None:
    """Switches a method of a dataset off, or on again: for a loader a method that is None does not exist."""
    vars(dataset).pop(method, None)
    if not is_on:
        setattr(dataset, method, None)


def name_of(step: Any) -> str:
    function = getattr(step, "func", step)
    return getattr(function, "__name__", type(function).__name__)


def is_of_albumentations(step: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "albumentations" for kind in type(step).__mro__)


def as_array(pixels: Any) -> np.ndarray:
    """An image as an array (H, W, C)."""
    if isinstance(pixels, torch.Tensor):
        return pixels.permute(1, 2, 0).contiguous().numpy()
    return np.asarray(pixels)


def as_tensor(pixels: Any) -> Any:
    """An image as a plain tensor (C, H, W). Anything but an array or a Pillow image is returned unchanged."""
    if isinstance(pixels, torch.Tensor):
        return pixels.as_subclass(torch.Tensor)
    if not isinstance(pixels, np.ndarray) and not hasattr(pixels, "getbands"):
        return pixels
    array = np.require(pixels, requirements=["C", "W"])  # W: Pillow's memory is read-only
    if array.ndim not in (2, 3):
        return pixels
    if array.ndim == 2:
        array = array[..., np.newaxis]
    return torch.from_numpy(array).permute(2, 0, 1)


def form_of(pixels: Any) -> str:
    if isinstance(pixels, (torch.Tensor, np.ndarray)):
        return f"{str(pixels.dtype).removeprefix('torch.')} {tuple(pixels.shape)}"
    return f"{type(pixels).__name__} {' '.join(str(pixels).split())[:60]}"
