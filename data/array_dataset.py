"""ArrayDataset: images in memory, randomly cropped and mirrored. They are padded once, so that a crop is a slice."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.nn.functional import interpolate

from data.errors import DataError
from data.guarded import guarded
from data.transform import ImageDataset, Transform, as_array
from loaders import takes_groups


class ArrayDataset(ImageDataset):
    """Images in memory, all of one size.

    images: uint8 (N, H, W, C); labels: integers (N,) or (N, 1), indices into `classes`.
    mean, std: one number per channel, for pixels scaled to 0..1.
    pad: pixels by which an image is padded (reflected) before the step "crop" takes a random (H, W) of it; 0: no crop.
    transforms: the arguments of ImageDataset. "center_crop" leaves samples as they are, and resizes new images.
    The attribute `images` has the images, padded if "crop" is the first step.
    Raises DataError for an argument that does not fit.
    """

    has_one_size = True

    _prepared_by = ("image_shape",)

    @guarded
    def __init__(
        self,
        images: np.ndarray,
        labels: Any,
        *,
        classes: Sequence[str],
        mean: Sequence[float],
        std: Sequence[float],
        train: bool,
        pad: int = 0,
        transform: Any = ("crop",),
        **transforms: Any,
    ) -> None:
        super().__init__(train, transform, **transforms)
        if images.dtype != np.uint8 or images.ndim != 4:
            raise DataError(f"images must be uint8 of shape (N, H, W, C), not {images.dtype} {images.shape}")
        labels = np.asarray(labels)  # also of lists and pandas
        if labels.shape not in (images.shape[:1], (len(images), 1)) or labels.dtype.kind not in "biu":
            raise DataError(
                f"{len(images)} images need labels of shape ({len(images)},), integers, not {labels.dtype} "
                f"{labels.shape}"
            )
        self.image_shape = images.shape[1:]
        largest = min(self.image_shape[:2]) - 1  # more pixels than that cannot be reflected
        if not 0 <= pad <= largest:
            raise DataError(f"data.pad={pad} must be 0 to {largest} for images of shape {self.image_shape}")
        self.classes = tuple(classes)
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.pad = pad
        self.labels = labels.astype(np.int64).reshape(-1)
        self._store(images)

    def _store(self, images: np.ndarray) -> None:
        """Keeps the images, padded if `transform` begins with "crop"."""
        is_padded = self.transform.crop == "crop" and not self.transform.before
        self._margin = self.pad if is_padded else 0  # pixels
        self.images = padded(images, self._margin)

    @property
    def _is_random(self) -> bool:
        return self._margin > 0 or self.transform.flips

    def write_images(self, indices: np.ndarray, images: torch.Tensor, random: Any) -> None:
        out = images.numpy()
        if self._is_random:
            out[...] = self._windows(self.images, indices, *self._places(random))
        else:
            np.take(self.images, indices, axis=0, out=out, mode="wrap")  # "raise" would write to a copy of `out`

    def read_image(self, index: int) -> torch.Tensor:  # as a batch of one it would take 1.5 times as long
        draws = torch.rand(3).tolist() if self._is_random else (0.0, 0.0, 1.0)
        return torch.from_numpy(self._part(self.images[index], self.transform.flips, *draws).copy())

    def whole(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.images[index].copy()).permute(2, 0, 1)

    def cropped(self, image: torch.Tensor, transform: Transform) -> torch.Tensor:
        pixels = as_array(image)
        is_random = transform.crop == "crop"
        if is_random:
            pixels = padded(pixels[np.newaxis], self.pad)[0]
            if any(side < least for side, least in zip(pixels.shape, self.image_shape[:2], strict=False)):
                raise DataError(f"{transform.key}: crop gets {pixels.shape}, and makes {self.image_shape}: enlarge it")
        else:
            pixels = resized_middle(pixels, *self.image_shape[:2])
        if is_random or transform.flips:
            pixels = self._part(pixels, transform.flips, *torch.rand(3).tolist())
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)

    def without_augmentation(self) -> Any:
        plain = super().without_augmentation()
        plain._store(self._unpadded(self.images))
        return plain

    def sample_ids(self) -> np.ndarray:
        """What identifies a sample: its pixels, without what they were padded by."""
        return self._unpadded(self.images)

    def arrays(self) -> dict[str, np.ndarray]:
        """All samples before augmentation: "image", uint8 (N, H + 2 pad, W + 2 pad, C), and "label", int64 (N,)."""
        return {"image": self.images, "label": self.labels}

    @takes_groups
    def augment_batch(self, batch: dict[str, torch.Tensor], random: Any) -> dict[str, torch.Tensor]:
        """Makes the samples of `read_batch` from rows of `arrays()`, on any device; without `random` not augmented."""
        if self.transform.functions:
            raise DataError(
                f"{self.transform.key} has functions of single images, not of batches: use loader=prefetch"
            )
        if not self._is_random:
            return batch
        images = batch["image"]
        height, width, _ = self.image_shape
        if random is None:
            return {**batch, "image": self._unpadded(images).contiguous()}
        top, left, is_mirrored = self._places(random)
        if images.device.type == "cpu":
            crops = self._windows(images.numpy(), np.arange(len(images)), top, left, is_mirrored)
            return {**batch, "image": torch.from_numpy(crops)}
        top += np.arange(len(top)) * images.shape[1]  # a row number among the rows of all images
        left[is_mirrored] += width - 1  # a mirrored row is read from its end backwards
        starts = torch.from_numpy(np.stack([top, left, np.where(is_mirrored, -1, 1)]))
        if images.is_cuda:
            starts = starts.pin_memory()  # a copy from pageable memory would make the host wait
        first_row, first_column, step = starts.to(images.device, non_blocking=True)[:, :, None]
        rows = first_row + torch.arange(height, device=images.device)
        columns = first_column + step * torch.arange(width, device=images.device)
        pixels = rows[:, :, None] * images.shape[2] + columns[:, None, :]
        selected = images.flatten(0, 2).index_select(0, pixels.flatten())
        return {**batch, "image": selected.view(-1, *self.image_shape)}

    def _places(self, random: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each image of a batch the top and left pixel of its crop, int64 (B,), and whether it is mirrored."""
        down, right, mirror = random.uniform(3).T
        offsets = 2 * self._margin + 1
        top = (down * offsets).astype(np.int64)
        left = (right * offsets).astype(np.int64)
        return top, left, self.transform.flips & (mirror < 0.5)

    def _windows(
        self, images: np.ndarray, indices: np.ndarray, top: np.ndarray, left: np.ndarray, is_mirrored: np.ndarray
    ) -> np.ndarray:
        """Cuts a window out of each image (N, H, W, C) at `indices` (B,), and mirrors some: (B, *image_shape).

        On a CPU an index per pixel takes longer.
        """
        height, width, channels = self.image_shape
        rows = images.reshape(*images.shape[:2], -1)
        windows = sliding_window_view(rows, (height, width * channels), axis=(1, 2))
        crops = windows[indices, top, left * channels].reshape(-1, *self.image_shape)
        mirrored = crops[is_mirrored]
        for channel in range(channels):  # faster than pixels of a few bytes
            crops[is_mirrored, :, :, channel] = mirrored[:, :, ::-1, channel]
        return crops

    def _unpadded(self, images: Any) -> Any:
        height, width, _ = self.image_shape
        return images[:, self._margin : self._margin + height, self._margin : self._margin + width]

    def _part(self, image: np.ndarray, flips: bool, down: float, right: float, mirror: float) -> np.ndarray:
        """Cuts `image_shape` out of an image, at a place that random numbers choose, and mirrors it if one says so."""
        height, width, _ = self.image_shape
        rows, columns, _ = image.shape
        top = int(down * (rows - height + 1))
        left = int(right * (columns - width + 1))
        image = image[top : top + height, left : left + width]
        return image[:, ::-1] if flips and mirror < 0.5 else image


def padded(images: np.ndarray, pixels: int) -> np.ndarray:
    """The images (N, H, W, C) with that many pixels more on each side, reflected."""
    if not pixels:
        return np.ascontiguousarray(images)
    sides = (pixels, pixels)
    return np.pad(images, ((0, 0), sides, sides, (0, 0)), mode="reflect")


def resized_middle(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Cuts the largest part of aspect ratio width:height out of the middle of `image`, and resizes it to that size.

    image: uint8 (H, W, C). Returns uint8 (height, width, C): bilinear and antialiased, as in Pillow.
    """
    if image.shape[:2] == (height, width):
        return image
    rows, columns = image.shape[:2]
    ratio = width / height
    tall = min(rows, round(columns / ratio))
    wide = min(columns, round(rows * ratio))
    top = (rows - tall) // 2
    left = (columns - wide) // 2
    part = torch.from_numpy(image[top : top + tall, left : left + wide].copy())
    resized = interpolate(part.permute(2, 0, 1)[None], (height, width), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous().numpy()
