"""data.transform and data.test_transform: one list of steps, which make the image of a sample in this order.

A step is the name of one of BUILT_IN, or a function of one image. ImageDataset is the base class of the datasets that
take these two keys.
Invariant: whatever a step takes and returns, a sample's image is uint8 (H, W, C), which is normalised later, or
float32 (C, H, W), which the network gets as it is.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch

from data.errors import DataError, explained
from data.guarded import Guarded, guarded

CROPS = ("crop", "center_crop")
BUILT_IN = (*CROPS, "flip", "trivial", "rand")
A_LIST = "it is a list: 'data.transform=[crop, flip, {_target_: MODULE.NAME, ARGUMENT: VALUE}]'"
# Keys that are not taken, as earlier versions did, and what to type instead.
OLD_KEYS = {
    "flip": "type 'data.transform=[crop]' for images that are not mirrored, [crop, flip] mirrors half of them",
    "policy": "type 'data.transform=[crop, flip, trivial]', or rand",
    "transform_after": "put crop and flip before your own step: 'data.transform=[crop, flip, {_target_: ...}]'",
    "transform_input": "wrap a function of arrays: {_target_: data.transform.OnArray, function: {_target_: ...}}",
    "transform": A_LIST,
    "transform._target_": A_LIST,
    "test_transform": A_LIST,
    "test_transform._target_": A_LIST,
}

OLD_FORM = ("flip", "policy", "transform_input", "transform_after")  # in each checkpoint of before the lists

Step = Callable[..., Any]


def upgraded(settings: Any) -> Any:
    """The section `data` of a checkpoint's config. What earlier versions had in place of lists of steps becomes lists.

    Also in sections inside it, such as the parts of a mixture.
    """
    if not isinstance(settings, dict):
        return settings
    settings = {key: upgraded(value) for key, value in settings.items()}
    if not settings.keys() >= {*OLD_FORM}:
        return settings
    flip, policy, takes, after = (settings.pop(key) for key in OLD_FORM)
    for key, built_in in (
        ("transform", ["crop", *["flip"] * bool(flip), *[policy] * bool(policy)]),
        ("test_transform", ["center_crop"]),
    ):
        own: Any = settings.get(key) or []
        steps = own if isinstance(own, list) else [own]
        if takes == "array":
            steps = [{"_target_": "data.transform.OnArray", "function": step} for step in steps]
        settings[key] = steps if steps and after == "decode" else [*built_in, *steps]
    return settings


class Transform:
    """A list of steps: built-in names and functions of one image. `key` is the list's name in errors.

    The dataset itself crops an image, and mirrors the crop: it need not decode more than that. So the list is kept in
    four slots, in this order: [rotate, crop, flip, blur] is before=[rotate], crop="crop", flips=True, after=[blur].
    before: functions that get the whole image;
    crop: "crop", "center_crop", or None, if images stay whole;
    flips: whether half of the crops, chosen at random, are mirrored;
    after: functions that get the result.
    A "flip" that does not follow the crop is a function; in a list of crop and flip alone it is put after the crop.

    A function gets a uint8 tensor (C, H, W), or what the one before it returned, as a tensor. One of albumentations
    gets an array (H, W, C). Arrays and Pillow images that a function returns have their channels last, tensors first.
    has_one_size: all images have the size of a sample, so a list of only [] or [flip] needs no crop to be said.
    """

    def __init__(self, key: str, steps: Any, has_one_size: bool = False) -> None:
        self.key = key
        self.steps = list(steps) if isinstance(steps, (list, tuple)) else [steps]
        self.crop: str | None = None
        self.flips = False
        self.before: list[Step] = []
        self.after: list[Step] = []
        ordered = self.steps
        if all(step in (*CROPS, "flip") for step in self.steps):
            ordered = sorted(self.steps, key="flip".__eq__)  # it may as well be mirrored after the crop, which is fast
            if has_one_size and not {*ordered} & {*CROPS}:
                self.crop = "center_crop"
        for step in ordered:
            self._add(step)

    def _add(self, step: Any) -> None:
        if not isinstance(step, str):
            if not callable(step) or isinstance(step, type):
                self._refuse(step)
            functions = self.before if self.crop is None else self.after
            functions.append(step)
        elif step in CROPS:
            if self.crop is not None:
                raise DataError(f"{self.key}={self.steps}: it can have only one of {' and '.join(CROPS)}")
            self.crop = step
        elif step == "flip" and self.crop is not None and not self.after:
            self.flips = True
        elif step == "flip":
            self._add(flip)
        elif step in BUILT_IN:
            self._add(RandomAugmentation(step))
        else:
            self._refuse(step)

    def _refuse(self, step: Any) -> None:
        raise DataError(
            f"{self.key}={step}: give a list of {', '.join(BUILT_IN)} and {{_target_: MODULE.NAME}}, a class, or a "
            "function that returns a transform; [] leaves images as they are"
        )

    @property
    def functions(self) -> list[Step]:
        return [*self.before, *self.after]

    @property
    def is_fast(self) -> bool:
        """Whether the dataset makes the image without functions, so in one size: then whole batches can be read."""
        return self.crop is not None and not self.functions

    def call(self, functions: Sequence[Step], image: torch.Tensor, name: str) -> torch.Tensor:
        """Calls one of `before` and `after` with an image (C, H, W), and returns one, uint8 or floats.

        Raises DataError with the image's name if a function fails, or the result is not an image.
        """
        if not functions:
            return image
        pixels: Any = image
        for function in functions:
            try:
                if is_of_albumentations(function):
                    pixels = function(image=as_array(pixels))["image"]
                else:
                    pixels = function(as_image_tensor(pixels))
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                form = form_of(as_image_tensor(pixels))
                raise DataError(
                    f"{self.key}: {name_of(function)} failed for {name}, {form}: {reason}; if it needs an array "
                    "(H, W, C), not a tensor, wrap it in data.transform.OnArray; if a Pillow image, in torchvision's "
                    "Compose, after ToPILImage (docs/data.md); the traceback is in train.log"
                ) from error
        return self._checked(as_image_tensor(pixels), len(image), name)

    def _checked(self, pixels: Any, channels: int, name: str) -> torch.Tensor:
        made = f"{self.key} returned {form_of(pixels)} for {name}"
        if not isinstance(pixels, torch.Tensor) or pixels.ndim != 3:
            raise DataError(f"{made}: it must return an image, a tensor (C, H, W) or an array (H, W, C)")
        is_uint8 = pixels.dtype == torch.uint8
        if len(pixels) != channels and (is_uint8 or pixels.shape[2] == channels):
            raise DataError(
                f"{made}, which has {channels} channels: keep them (Grayscale: set num_output_channels), in tensors "
                "(C, H, W) or arrays (H, W, C); wrap a function that takes arrays in data.transform.OnArray"
            )
        if not is_uint8 and not pixels.is_floating_point():
            raise DataError(f"{made}: return uint8, 0 to 255, or floats, which the network gets as they are")
        return pixels


class OnArray:
    """A step of a function of arrays: {_target_: data.transform.OnArray, function: {_target_: ...}}.

    The function gets an array (H, W, C), and returns one, or any other image that a step may return.
    """

    def __init__(self, function: Step) -> None:
        self.func = function  # as in functools.partial: see name_of

    def __call__(self, image: Any) -> Any:
        return self.func(as_array(image))


class RandomAugmentation:
    """The steps "trivial" and "rand", of torchvision.

    They are TrivialAugmentWide (Müller and Hutter, arXiv:2103.10158) and RandAugment (Cubuk et al., arXiv:1909.13719).
    """

    def __init__(self, name: str) -> None:
        # Imported here, because it takes a second in every worker that is spawned.
        from torchvision.transforms import InterpolationMode, v2

        kind = {"trivial": v2.TrivialAugmentWide, "rand": v2.RandAugment}[name]
        self._transform = kind(interpolation=InterpolationMode.BILINEAR)
        self.__name__ = name  # for errors: see name_of

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return self._transform(image)


def flip(image: torch.Tensor) -> torch.Tensor:
    """The step "flip" where it does not follow a crop."""
    return image.flip(2) if torch.rand(1) < 0.5 else image


class GlobalRandom:
    """The random numbers of one sample, from torch's global generator, which the loader seeds for each sample."""

    def uniform(self, k: int) -> np.ndarray:
        return torch.rand(1, k).numpy()


STEPS_OF_PREPARE = ("prepare", "transformed", "stored", "cropped", "__getitem__")  # the methods of ImageDataset


class ImageDataset(Guarded):
    """Base class of our datasets of images: reads samples by `transform`, one at a time or as whole batches.

    transform, test_transform: the steps for training samples, and for test samples and new images: see Transform.
    stratify: see data.subset.split.

    A subclass sets `classes`, `labels` (N, ...), which become an array, and `image_shape`, the (H, W, C) of a crop.
    It defines
    - `write_images(indices, images, random)`: crops and mirrors as `transform` says, without its functions, and writes
      the result into `images`, uint8 (B, H, W, C);
    - `whole(index)`: the image as it is stored, uint8 (C, H, W);
    - `cropped(image, transform)`, which crops and mirrors a whole image (C, H, W), uint8 or floats.

    The attribute `transform` is for this dataset's samples. If it has functions, samples have no fixed form, and the
    loader reads them one by one, because it seeds the generators for each.
    """

    has_one_size = False
    _prepared_by: tuple[str, ...] = ()  # the attributes that `prepare` depends on, of a class that has all its steps
    classes: tuple[str, ...]
    labels: np.ndarray
    image_shape: tuple[int, ...]

    @guarded
    def __init__(
        self,
        train: bool,
        transform: Any = ("crop", "flip"),
        test_transform: Any = ("center_crop",),
        stratify: bool = False,
        **others: Any,
    ) -> None:
        for key, value in others.items():
            remedy = OLD_KEYS.get(key, "remove it")
            raise DataError(f"data.{key}={value}: {type(self).__name__} has no such setting: {remedy}")
        self.stratify = stratify
        training_transform = Transform("data.transform", transform, self.has_one_size)
        self.test_transform = Transform("data.test_transform", test_transform, self.has_one_size)
        self.transform = training_transform if train else self.test_transform

    def __setattr__(self, name: str, value: Any) -> None:
        is_labels = name == "labels" and value is not None
        super().__setattr__(name, label_array(type(self).__name__, value) if is_labels else value)

    def write_images(self, indices: np.ndarray, images: torch.Tensor, random: Any) -> None:
        raise NotImplementedError

    def whole(self, index: int) -> torch.Tensor:
        raise NotImplementedError

    def cropped(self, image: torch.Tensor, transform: Transform) -> torch.Tensor:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def sample_spec(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]] | None:
        """The form of a sample; None if `transform` has functions, which may return images of any form."""
        if not self.transform.is_fast:
            return None
        labels = torch.from_numpy(self.labels[:0])
        return {"image": (self.image_shape, torch.uint8), "label": (labels.shape[1:], labels.dtype)}

    def read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        """Writes the samples at `indices` (B,) into `out`; numbers from `random.uniform` replace torch's generator."""
        np.take(self.labels, indices, axis=0, out=out["label"].numpy())  # raises IndexError if one is out of range
        self.write_images(indices, out["image"], random)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        label = torch.tensor(self.labels[index])
        transform = self.transform
        if transform.crop is None or transform.before:
            image = self.transformed(self.whole(index), transform, self.image_name(index))
        else:
            image = self.read_image(index)
            if transform.after:
                pixels = transform.call(transform.after, image.permute(2, 0, 1), self.image_name(index))
                image = in_layout(pixels)
        return {"image": image, "label": label}

    def read_image(self, index: int) -> torch.Tensor:
        """Crops and mirrors an image as `write_images` does: uint8 (H, W, C)."""
        images = torch.empty((1, *self.image_shape), dtype=torch.uint8)
        self.write_images(np.array([index]), images, GlobalRandom())
        return images[0]

    def image_name(self, index: int) -> str:
        """The name of a sample's image, for errors."""
        return str(self.path(index)) if hasattr(self, "path") else f"image {index}"

    def transformed(self, pixels: torch.Tensor, transform: Transform, name: str) -> torch.Tensor:
        """Makes a sample's image from a whole one, uint8 (C, H, W), with all steps."""
        pixels = transform.call(transform.before, pixels, name)
        if transform.crop is not None:
            pixels = self.cropped(pixels, transform)
        return in_layout(transform.call(transform.after, pixels, name))

    def stored(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the dataset's files have of an image (C, H, W): a cache or a pack may have resized it."""
        return pixels

    def prepare(self, image: np.ndarray) -> torch.Tensor:
        """Makes the image of a test sample from a new image, uint8 (H, W, C) of any size."""
        pixels = self.stored(torch.from_numpy(image.copy()).permute(2, 0, 1))
        return self.transformed(pixels, self.test_transform, "a new image")

    @property
    def prepared_by(self) -> dict[str, Any] | None:
        """What `prepare` depends on, for a checkpoint.

        None if a subclass changes one of STEPS_OF_PREPARE, or test_transform is not [center_crop].
        """
        kind = type(self)
        ours = next(base for base in kind.__mro__ if "_prepared_by" in vars(base))
        is_ours = all(getattr(kind, step) is getattr(ours, step) for step in STEPS_OF_PREPARE)
        if not self._prepared_by or not is_ours or self.test_transform.steps != ["center_crop"]:
            return None
        return {name: getattr(self, name) for name in self._prepared_by}

    def without_augmentation(self) -> Any:
        plain = copy(self)
        plain.transform = self.test_transform
        return plain


def label_array(kind: str, labels: Any) -> np.ndarray:
    """The labels (N, ...) of a list, a tensor or a pandas column in its order. kind: the dataset's class."""
    if hasattr(labels, "iloc"):  # its own labels are no positions
        labels = labels.to_numpy()
    remedy = "set numbers, as many for each sample; of classes their places, self.classes.index(name)"
    with explained(f"{kind}.labels cannot be used", remedy):
        array = np.require(labels, requirements=["W"])  # pandas' memory may be read-only, which torch warns of
        if array.ndim == 0 or array.dtype.kind not in "biuf":
            raise ValueError(f"it is {form_of(array)}")
    return array


def in_layout(pixels: torch.Tensor) -> torch.Tensor:
    """The image of a sample from one (C, H, W): uint8 (H, W, C), or float32 (C, H, W)."""
    if pixels.dtype == torch.uint8:
        return pixels.permute(1, 2, 0).contiguous()
    return pixels.float().contiguous()


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


def as_image_tensor(pixels: Any) -> Any:
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
