"""CroppedDataset: samples are resized crops of images of any size, as is usual for ImageNet.

Subclasses read the images. Crops are resized directly into the batch's memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from data.augment import Policy
from data.errors import DataError, check_choice
from data.images.decoders import choose
from data.images.decoding import Box, Crop, Size, cut, decode, image_errors

RATIOS = (3 / 4, 4 / 3)  # width divided by height, of the narrowest and of the widest training crop
CROP_ATTEMPTS = 10
DRAWS = 1 + 4 * CROP_ATTEMPTS  # random numbers that a training sample needs, without a policy
TEST_GAP = 2  # a test image decoded at a fraction of its size keeps at least twice as many pixels a side as needed
LONGEST_SIDE = 64  # in evaluation, an image's longer side is cut to at most 64 times the shorter one
# interpolate(antialias=True) calls these, but cannot write into given memory. They give Pillow's results. The same
# operators in torch.ops take longer to call.
RESIZE: dict[str, Callable[..., Any]] = {
    "bilinear": torch._C._nn._upsample_bilinear2d_aa,
    "bicubic": torch._C._nn._upsample_bicubic2d_aa,
}

File = tuple[Any, str]  # the content of an image file, usually bytes, and its name for errors
Read = Callable[[Crop, float], torch.Tensor]  # CroppedDataset.decoded for one image


class CroppedDataset:
    """Images of any size, cropped and resized.

    A training sample is a random crop of at least `min_area` (0..1) of the image, resized (Szegedy et al.,
    arXiv:1409.4842; torchvision's RandomResizedCrop), mirrored half of the time if `flip` is true, and then augmented
    by `policy` (data.augment.Policy). A test sample is the middle of the image: the shorter side is resized to
    image_size / test_crop, and then a square of image_size is cut out. `interpolation` is bilinear or bicubic, with
    antialiasing. None stands for image_size=224, interpolation="bilinear" and test_crop=0.875.

    Samples are RGB, uint8 (image_size, image_size, 3), and labels int64 (). A subclass sets `classes` and `labels`, an
    array (N,), and defines `encoded`; one that has no image files also `decoded`. decoder: "auto", or the first of the
    decoders to try (decoders.choose). With decode_on="device" `read_batch` only reads the files, and
    data/images/decode_on_device.py decodes them. Raises DataError for a value out of range.
    """

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, which pretrained networks expect
    classes: tuple[str, ...]
    labels: np.ndarray
    advice = "replace or remove it"  # what to do about an image that cannot be read

    def __init__(
        self,
        train: bool,
        image_size: int | None = None,
        min_area: float = 0.08,
        flip: bool = True,
        policy: str | None = None,
        interpolation: str | None = None,
        test_crop: float | None = None,
        decoder: str = "auto",
        decode_on: str = "workers",
    ) -> None:
        image_size = 224 if image_size is None else image_size
        if not isinstance(image_size, int) or image_size < 1:
            raise DataError(f"data.image_size={image_size} must be a whole number, at least 1")
        self.test_crop = 224 / 256 if test_crop is None else test_crop
        for key, share in {"min_area": min_area, "test_crop": self.test_crop}.items():
            if not isinstance(share, (int, float)) or not 0 < share <= 1:
                raise DataError(f"data.{key}={share} must be a number above 0 and at most 1")
        self.shape: tuple[int, ...] = (image_size, image_size, 3)  # of a sample
        self.interpolation = interpolation or "bilinear"
        check_choice("data.interpolation", self.interpolation, RESIZE, DataError)
        check_choice("data.decode_on", decode_on, ("workers", "device"), DataError)
        self.decode_on, self._decoders = decode_on, choose(decoder)
        self.train, self.image_size, self.min_area, self.flip = train, image_size, min_area, flip
        self.policy = Policy(policy) if train and policy is not None else None

    def encoded(self, index: int) -> File:
        """Returns the bytes of the image file at `index`, and its name for errors."""
        raise NotImplementedError

    def encoded_rows(self, indices: np.ndarray) -> Iterator[tuple[int, File]]:
        """For each of a batch's images, in any order: its row, and what `encoded` returns."""
        return enumerate(map(self.encoded, indices.tolist()))

    def decoded(self, data: Any, name: str, crop: Crop, enough: float) -> torch.Tensor:
        """Decodes the box that `crop` chooses in an image that `encoded` returned: RGB, uint8 (3, H, W).

        If both sides of the box have at least 2, 4 or 8 times `enough` pixels, it may be returned at 1/2, 1/4 or 1/8
        of its size. Raises DataError if the file is damaged.
        """
        with image_errors(name, self.advice):
            return decode(data, crop, enough, self._decoders)

    def without_augmentation(self) -> "CroppedDataset":
        """Returns a dataset of the same images, cropped as test images are."""
        plain = copy(self)
        plain.train, plain.policy = False, None
        return plain

    def __len__(self) -> int:
        return len(self.labels)

    def sample_spec(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        spec = {"image": (self.shape, torch.uint8), "label": ((), torch.int64)}
        return spec if self.decode_on == "workers" else {"label": spec["label"]}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.sample(self.encoded(index), int(self.labels[index]))

    def sample(self, file: File, label: int) -> dict[str, torch.Tensor]:
        """Makes a sample of what `encoded` returned, with random numbers from torch's generator."""
        image = torch.empty((1, *self.shape), dtype=torch.uint8)
        self.write(partial(self.decoded, *file), image.permute(0, 3, 1, 2), torch.rand(self._draws).tolist())
        return {"image": image[0], "label": torch.tensor(label)}

    def prepare(self, image: np.ndarray) -> torch.Tensor:
        """Resizes the shorter side to image_size / test_crop, and cuts a square of image_size out of the middle.

        `interpolation` is antialiased, as in Pillow. This is what `__getitem__` does to a test image; it decodes large
        JPEGs at a fraction of their size, which may change a pixel by a few levels.
        image: RGB, uint8 (H, W, 3). Returns uint8 (image_size, image_size, 3).
        """
        pixels, sample = torch.from_numpy(image).permute(2, 0, 1), torch.empty((1, *self.shape), dtype=torch.uint8)
        self.write(partial(cut, pixels), sample.permute(0, 3, 1, 2), ())
        return sample[0]

    def read_batch(self, indices: np.ndarray, out: dict[str, Any], random: Any) -> None:
        """Writes the samples at `indices` (B,) into out["image"], uint8 (B, H, W, C), and out["label"], int64 (B,).

        Augments as `__getitem__` does, with numbers from `random.uniform`: float64 (B, DRAWS), or more for a policy.
        With decode_on="device", out["image"] becomes EncodedImages.
        """
        np.take(self.labels, indices, out=out["label"].numpy())
        draws = random.uniform(self._draws)
        if self.decode_on == "device":
            from data.images.decode_on_device import EncodedImages  # here, because a fork may have deleted it

            files = [file for _, file in sorted(self.encoded_rows(indices))]
            out["image"] = EncodedImages.from_files(files, draws)
            return
        images, of_rows = out["image"].permute(0, 3, 1, 2).split(1), draws.tolist()
        for row, file in self.encoded_rows(indices):
            self.write(partial(self.decoded, *file), images[row], of_rows[row])

    @classmethod
    def check_run(cls, section: dict[str, Any], device: str, loader: str) -> None:
        """Raises DataError if the settings of the section `data` do not fit a run on `device` with loader=`loader`."""
        if section.get("decode_on") != "device":
            return
        if device == "cpu" or not torch.cuda.is_available():
            raise DataError("data.decode_on=device needs a GPU, but this run uses the CPU: use data.decode_on=workers")
        if loader in ("resident", "torch"):
            raise DataError(f"data.decode_on=device: loader={loader} needs decoded images: use loader=prefetch")

    def transform_on_device(self, then: Callable[..., Any]) -> Callable[..., Any]:
        """The transform of batches on the device: `then`, with decode_on="device" after decoding."""
        if self.decode_on == "workers":
            return then
        from data.images.decode_on_device import DecodeOnDevice

        return DecodeOnDevice(self, then)

    @property
    def _draws(self) -> int:
        return 0 if not self.train else DRAWS + (self.policy.draws if self.policy else 0)

    def write(self, read: Read, image: torch.Tensor, draws: Sequence[float]) -> None:
        """Writes one sample into `image` (1, C, H, W), a view of memory in channels-last order, on any device.

        `read(crop, enough)` is `self.decoded` for this sample, onto that device. For a test sample `draws` is empty.
        """
        if not draws:
            shorter = int(self.image_size / self.test_crop + 1e-6)  # 96 / (96 / 118) is just below 118
            pixels = read(middle, TEST_GAP * shorter)
            size = with_shorter_side((pixels.shape[2], pixels.shape[1]), shorter)
            pixels = resized(pixels, size, self.interpolation)
            top, left = (round((side - self.image_size) / 2) for side in pixels.shape[1:])
            image.copy_(pixels[None, :, top : top + self.image_size, left : left + self.image_size])
            return
        pixels = read(lambda size: random_crop(size, self.min_area, draws[1:DRAWS]), self.image_size)
        resize(pixels, image, self.interpolation)
        if self.flip and draws[0] < 0.5:
            image.copy_(image.flip(3))
        if self.policy is not None:
            image[0] = self.policy(image[0], draws[DRAWS:])


def random_crop(size: Size, min_area: float, uniforms: Sequence[float]) -> Box:
    """A random box in an image of `size` (width, height). `uniforms` are 4 * CROP_ATTEMPTS numbers in [0, 1).

    Takes the first attempt that fits into the image. If none fits, takes the largest box in the middle.
    """
    width, height = size
    for attempt in range(0, 4 * CROP_ATTEMPTS, 4):
        area, ratio, right, down = uniforms[attempt : attempt + 4]
        area = width * height * (min_area + (1 - min_area) * area)
        ratio = RATIOS[0] * (RATIOS[1] / RATIOS[0]) ** ratio
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(right * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIOS[1])), min(height, round(width / RATIOS[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def middle(size: Size) -> Box:
    """The box of all pixels of an image, or of its middle if it is so long that resizing it would fill memory."""
    spare_width, spare_height = (max(0, side - LONGEST_SIDE * min(size)) // 2 for side in size)
    return spare_width, spare_height, size[0] - spare_width, size[1] - spare_height


def with_shorter_side(size: Size, shorter: int) -> Size:
    """The size that an image of `size` (width, height) has when its shorter side is resized to `shorter` pixels."""
    return size[0] * shorter // min(size), size[1] * shorter // min(size)


def resized(pixels: torch.Tensor, size: Size, interpolation: str = "bilinear") -> torch.Tensor:
    """Resizes `pixels` (3, H, W) to `size` (width, height); a new image is channels last."""
    width, height = size
    if pixels.shape[1:] == (height, width):
        return pixels
    image = torch.empty((1, height, width, 3), dtype=torch.uint8, device=pixels.device).permute(0, 3, 1, 2)
    resize(pixels, image, interpolation)
    return image[0]


def resize(pixels: torch.Tensor, image: torch.Tensor, interpolation: str = "bilinear") -> None:
    """Resizes `pixels` (C, H, W) into the memory of `image` (1, C, h, w), which is channels last."""
    if pixels.is_cuda:  # the operators for CUDA take only floats
        image.copy_(resized_as_floats(pixels[None], image.shape[2:], interpolation))
        return
    pixels = pixels[None].contiguous(memory_format=torch.channels_last)  # the operator would copy a crop anyway
    RESIZE[interpolation](pixels, image.shape[2:], False, None, None, out=image)


def resized_as_floats(pixels: torch.Tensor, size: Sequence[int], interpolation: str) -> torch.Tensor:
    """Resizes `pixels` (B, C, H, W) to `size` (height, width): whole numbers from 0 to 255, in float32.

    Rounds after each axis, as the operators for uint8 do: the results differ by two levels at most.
    """
    resized = pixels.float()
    for step in ((pixels.shape[2], size[1]), (size[0], size[1])):
        resized = interpolate(resized, step, mode=interpolation, antialias=True).round_().clamp_(0, 255)
    return resized


def class_indices(values: np.ndarray, classes: np.ndarray, path: Callable[[int], str], remedy: str) -> np.ndarray:
    """The index in `classes` (K,) of each of `values` (N,), the samples' labels: int64 (N,).

    Raises DataError for a label that is not a class: a sentence with the sample's `path(index)` that ends in `remedy`.
    """
    if values.dtype.kind != classes.dtype.kind:  # a number matches the name that has its digits
        values, classes = values.astype(str), classes.astype(str)
    order = np.argsort(classes)
    nearest = order[np.searchsorted(classes, values, sorter=order).clip(max=len(classes) - 1)]
    for unknown in np.flatnonzero(classes[nearest] != values).tolist():
        reason = f"has the label {values[unknown]}, which is not one of the {len(classes)} classes"
        raise DataError(f"{path(unknown)} {reason}; {remedy}")
    return nearest
