"""BatchTransform: what a training batch goes through on the device, as one list of stages. Normalize: one of them.

Invariant: the functions of augment.transform get floats in 0 to 1, (B, C, H, W), in new memory, which they may change
in place; what they return is normalised after them. So they never get normalised images, and nothing is normalised
twice.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from data.augment import blend, erase_boxes, paste, random_boxes
from data.errors import DataError, explained
from data.transform import name_of
from loaders import signature_of

log = logging.getLogger(__name__)

LARGEST = 1.5  # mean or std of pixels that are scaled to 0..1, without a warning
SLACK = 0.1  # how far pixels may be out of 0 to 1, as those of some interpolations are, without a warning

Batch = dict[str, Any]
Stage = Callable[[Batch, Any], Batch]


class Normalize:
    """uint8 images (B, H, W, C) -> (x / 255 - mean) / std, as `dtype` (B, C, H, W) in channels-last memory.

    It takes a batch, a dict with the images, and returns a new dict, in which the other fields are unchanged.
    `random` is not used. It takes groups (loaders.takes_groups).
    mean, std: one number per channel, for pixels scaled to 0..1: a list, an array or a tensor. fields: the names of
    the fields with images.
    Raises DataError unless the images are uint8 (B, H, W, C) with that number of channels.
    """

    takes_groups = True

    def __init__(
        self,
        mean: Any,
        std: Any,
        dtype: torch.dtype = torch.float32,
        fields: Sequence[str] = ("image",),
    ) -> None:
        self.mean = as_floats(mean)
        self.std = as_floats(std)
        self.dtype = dtype
        self.fields = tuple(fields)
        self._constants: dict[tuple[torch.device, int], tuple[torch.Tensor, ...]] = {}
        if max(*self.mean, *self.std) > LARGEST:
            log.warning(
                "mean %s and std %s, which normalise the images, seem to be of pixels from 0 to 255: divide them by "
                "255; if a dataset's `mean` and `std` are of something else, such as targets, rename them",
                self.mean,
                self.std,
            )

    def __call__(self, batch: Batch, random: Any = None) -> Batch:
        normalized = {name: self._normalized(batch[name]) for name in self.fields}
        return {**batch, **normalized}

    def _normalized(self, image: torch.Tensor) -> torch.Tensor:
        if image.dtype != torch.uint8 or image.ndim != 4 or image.shape[3] != len(self.mean):
            raise DataError(
                f"Normalize needs uint8 images of shape (B, H, W, {len(self.mean)}), not {image.dtype} "
                f"{tuple(image.shape)}; change what the dataset returns, or give one mean and std per channel"
            )
        shift, scale = self.constants(image.device, width=image.shape[2])
        # Operating on rows of W * C values instead of pixels of C is five times as fast on a CPU, as the inner loop is
        # longer. It takes a single pass: the kernel reads uint8, computes in float32 and writes `dtype`.
        rows = image.flatten(2)
        result = torch.empty(rows.shape, dtype=self.dtype, device=rows.device)
        torch.addcmul(shift, rows, scale, out=result)
        return result.view(image.shape).permute(0, 3, 1, 2)

    def undone(self, images: torch.Tensor) -> torch.Tensor:
        """The pixels, 0 to 1, of normalised images (..., C, H, W)."""
        mean, std = torch.tensor([self.mean, self.std], device=images.device)[..., None, None]
        return images * std + mean

    def constants(self, device: torch.device, width: int) -> tuple[torch.Tensor, ...]:
        """(shift, scale), float32 (W * C,) each, for shift + pixel * scale; made once per device and width."""
        key = (device, width)
        if key not in self._constants:
            mean, std = torch.tensor([self.mean, self.std])
            self._constants[key] = torch.stack([-mean / std, 1 / (255 * std)]).repeat(1, width).to(device).unbind()
        return self._constants[key]


class BatchTransform:
    """Calls the user's functions, normalises, erases boxes and mixes images: `stages` are (name, function), in order.

    normalize: None for float images that are normalised already.
    functions: of augment.transform. They get the images, and the labels if they take them, and return the same. They
    draw from the global generators, so a Preloader has to call the BatchTransform as `finish`, which seeds them, in
    the consumer's thread. Without functions it draws from `random` alone: it is a `transform`, for the side stream.
    erase: share (0..1) of the images in which a box becomes the mean colour (Zhong et al., arXiv:1708.04896).
    mixup: images are blended in pairs, with weights from Beta(mixup, mixup) (Zhang et al., arXiv:1710.09412).
    cutmix: a box is copied from another image, its area from Beta(cutmix, cutmix) (Yun et al., arXiv:1905.04899).
    0 switches each of them off. If both mixup and cutmix are on, a batch gets one of them, each with probability 1/2.
    All three are attributes, which may be set between batches; but what is off at first stays off.
    image, label: the names of the fields; label may be None, if nothing needs it. In a mixed batch the label becomes
    the share of each class, float32 (B, num_classes). The results are those of torchvision's RandomErasing, MixUp and
    CutMix, but the host never waits for the device. The batch that it gets is never changed.
    Without functions it takes groups (loaders.takes_groups): images are mixed batch by batch.
    """

    def __init__(
        self,
        normalize: Normalize | None,
        functions: Sequence[Callable[..., Any]] = (),
        num_classes: int = 0,
        erase: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        image: str = "image",
        label: str | None = "label",
    ) -> None:
        self.num_classes = num_classes
        self.image = image
        self.label = label or "label"
        self.functions = functions
        self.erase = erase
        self.mixup = mixup
        self.cutmix = cutmix
        self._has_run = False
        self.takes_groups = not functions
        self.stages: list[tuple[str, Stage]] = []
        if functions and normalize is not None:
            channels = len(normalize.mean)
            to_floats = Normalize([0.0] * channels, [1.0] * channels, normalize.dtype, [image])
            self.stages.append(("pixels from 0 to 1", to_floats))
            for function in functions:
                takes = label is not None and takes_labels(function)
                check_arguments(function, 2 if takes else 1)
                self.stages.append((f"augment.transform: {name_of(function)}", partial(self._call, function, takes)))
            self.stages.append(("normalised", partial(self._normalize_floats, normalize)))
        elif normalize is not None:
            self.stages.append(("normalised", normalize))
        else:
            self.stages.append(("copied", self._copy))
        if erase:
            self.stages.append(("augment.erase", self._erase))
        if mixup or cutmix:
            self.stages.append(("augment.mixup, augment.cutmix", self._mix))

    def __call__(self, batch: Batch, random: Any = None) -> Batch:
        for _, stage in self.stages:
            batch = stage(batch, random)
        self._has_run = True
        return batch

    def _copy(self, batch: Batch, random: Any) -> Batch:
        return {**batch, self.image: batch[self.image].clone()}

    def _call(self, function: Callable[..., Any], takes_labels: bool, batch: Batch, random: Any) -> Batch:
        images = batch[self.image]
        count = len(images)
        if takes_labels:
            images, labels = function(images, batch[self.label].clone())
            batch = {**batch, self.label: labels}
        else:
            images = function(images)
        self._check(function, images, count)
        return {**batch, self.image: images}

    def _check(self, function: Any, images: Any, count: int) -> None:
        is_tensor = isinstance(images, torch.Tensor)
        if not is_tensor or images.ndim != 4 or len(images) != count or not images.is_floating_point():
            form = f"{images.dtype} {tuple(images.shape)}" if is_tensor else type(images).__name__
            raise DataError(
                f"augment.transform: {name_of(function)} returned {form}: it must return the {count} images, floats "
                "(B, C, H, W); with a parameter `labels` it gets the labels, and returns (images, labels)"
            )
        if not self._has_run:  # later the host must not wait for the device
            least = images.min().item()
            most = images.max().item()
            if least < -SLACK or most > 1 + SLACK:
                log.warning(
                    "augment.transform: %s returned pixels from %.2f to %.2f: it gets 0 to 1, and the images are "
                    "normalised after it, so leave out its own normalisation",
                    name_of(function),
                    least,
                    most,
                )

    def _normalize_floats(self, normalize: Normalize, batch: Batch, random: Any) -> Batch:
        images = batch[self.image]
        constants = normalize.constants(images.device, width=1)  # for pixels up to 255, and these are up to 1
        shift, scale = (values[:, None, None] for values in constants)
        return {**batch, self.image: torch.addcmul(shift, images, 255 * scale).to(normalize.dtype)}

    def _erase(self, batch: Batch, random: Any) -> Batch:
        images = batch[self.image]
        erase_boxes(images, random_boxes(images, self.erase, random))
        return batch

    def _mix(self, batch: Batch, random: Any) -> Batch:
        images = batch[self.image]
        labels = batch[self.label]
        if labels.is_floating_point():  # they are shares already
            shares = labels.float()
        else:
            shares = torch.zeros((len(images), self.num_classes), device=images.device)
            with explained(
                f"augment.mixup, augment.cutmix: a label is not one of the {self.num_classes} classes",
                "correct it; labels that the loss ignores cannot be mixed",
                RuntimeError,
            ):
                shares.scatter_(1, labels.long().view(-1, 1), 1.0)
        mixes = [(mix, alpha) for mix, alpha in ((blend, self.mixup), (paste, self.cutmix)) if alpha > 0]
        draws = random.uniform(2).reshape(-1, 2).tolist()  # a row per batch
        length = len(images) // len(draws)
        mixed = []
        for (which, seed), part, part_shares in zip(draws, images.split(length), shares.split(length), strict=True):
            share = 1.0
            if mixes:
                mix, alpha = mixes[int(which * len(mixes))]
                share = mix(part, np.random.default_rng(int(seed * 2**53)), alpha)
            mixed.append(part_shares.lerp(part_shares.roll(1, 0), 1 - share))
        return {**batch, self.label: torch.cat(mixed)}


def check_arguments(function: Callable[..., Any], count: int) -> None:
    """Raises DataError for a function of augment.transform that cannot be called with `count` arguments."""
    try:
        signature_of(function).bind(*[None] * count)
    except TypeError as error:
        raise DataError(
            f"augment.transform: {name_of(function)} is called with the images, and with the labels if it has a "
            f"parameter `labels` ({error}): call it in a function of yours that takes these"
        ) from error
    except ValueError:  # some builtins have no signature
        pass


def takes_labels(step: Callable[..., Any]) -> bool:
    """Whether it has a parameter `labels`, or is from torchvision's v2, which passes labels on."""
    if type(step).__module__.startswith("torchvision.transforms.v2"):
        return True
    try:
        return "labels" in signature_of(step).parameters
    except ValueError:  # some builtins have no signature
        return False


def as_floats(values: Any) -> tuple[float, ...]:
    return tuple(np.asarray(values, float).flatten().tolist())
