"""ArrayDataset: images in memory, randomly cropped and mirrored. They are padded once, so that a crop is a slice."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from data.errors import DataError
from data.own_transform import Transformed


class ArrayDataset(Transformed):
    """Images in memory. A training sample is a random crop of the padded image, mirrored half of the time.

    images: uint8 (N, H, W, C); labels: integers (N,) or (N, 1), indices into `classes`.
    mean, std: one number per channel, for pixels scaled to 0..1.
    pad: pixels by which the images are padded (reflected) before a crop of (H, W) is taken; 0: no crop.
    flip: whether samples are mirrored.
    transforms: the arguments of Transformed: your own transform, instead of crop and flip or after them.
    With train=False samples are not augmented. The attribute `images` has the padded images.
    Raises DataError for an argument that does not fit.
    """

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
        flip: bool = False,
        **transforms: Any,
    ) -> None:
        super().__init__(train, **transforms)
        if images.dtype != np.uint8 or images.ndim != 4:
            raise DataError(f"images must be uint8 of shape (N, H, W, C), not {images.dtype} {images.shape}")
        labels = np.asarray(labels)  # also of lists and pandas
        if labels.shape not in (images.shape[:1], (len(images), 1)) or labels.dtype.kind not in "biu":
            form = f"{labels.dtype} {labels.shape}"
            raise DataError(f"{len(images)} images need labels of shape ({len(images)},), integers, not {form}")
        self.image_shape = images.shape[1:]
        largest = min(self.image_shape[:2]) - 1  # more pixels than that cannot be reflected
        if not 0 <= pad <= largest:
            raise DataError(f"data.pad={pad} must be 0 to {largest} for images of shape {self.image_shape}")
        self.classes = tuple(classes)
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.pad = pad
        self.flip = flip
        if not train or self.gets_whole_images:
            self.pad = 0
            self.flip = False
        sides = (self.pad, self.pad)
        self.images = np.pad(images, ((0, 0), sides, sides, (0, 0)), mode="reflect")
        self.labels = labels.astype(np.int64).reshape(-1)

    def __len__(self) -> int:
        return len(self.images)

    def sample_spec(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"image": (self.image_shape, torch.uint8), "label": ((), torch.int64)}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = self.images[index]
        if self.pad or self.flip:
            image = self._augmented(image, *torch.rand(3).tolist())
        pixels = torch.from_numpy(image.copy())  # a copy, so that changing it in place does not change the dataset
        if self.transform is not None:
            pixels = self.transform(pixels.permute(2, 0, 1), f"image {index}")
        return {"image": pixels, "label": torch.tensor(self.labels[index])}

    def prepare(self, image: np.ndarray) -> np.ndarray | torch.Tensor:
        """Resizes an image of any size, uint8 (H, W, C), to a sample's height and width: see `resized_middle`.

        data.test_transform is called after that, or, if it takes whole images, instead of that.
        """
        transform = self.test_transform
        if transform is None or transform.after == "crop":
            image = resized_middle(image, *self.image_shape[:2])
        if transform is None:
            return image
        pixels = torch.from_numpy(image.copy())
        return transform(pixels.permute(2, 0, 1), "a new image")

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        """Writes the samples at `indices` (B,) into `out`; numbers from `random.uniform` replace torch's generator."""
        np.take(self.labels, indices, out=out["label"].numpy())  # raises IndexError if one is out of range
        images = out["image"].numpy()
        if self.pad or self.flip:
            draws = random.uniform(3).tolist()
            for row, index in enumerate(indices):
                images[row] = self._augmented(self.images[index], *draws[row])
        else:
            np.take(self.images, indices, axis=0, out=images, mode="wrap")  # "raise" would write to a copy of `out`

    def without_augmentation(self) -> "ArrayDataset":
        plain = copy(self)
        plain.images = np.ascontiguousarray(self._unpadded(self.images))
        plain.pad = 0
        plain.flip = False
        plain.use_transform(self.test_transform)
        return plain

    def sample_ids(self) -> np.ndarray:
        """What identifies a sample: its pixels, without what they were padded by."""
        pixels: np.ndarray = self._unpadded(self.images)
        return pixels

    def arrays(self) -> dict[str, np.ndarray]:
        """All samples before augmentation: "image", uint8 (N, H + 2 pad, W + 2 pad, C), and "label", int64 (N,)."""
        return {"image": self.images, "label": self.labels}

    def augment_batch(self, batch: dict[str, torch.Tensor], random: Any) -> dict[str, torch.Tensor]:
        """Makes the samples of `read_batch` from rows of `arrays()`, on any device; without `random` not augmented."""
        if self.transform is not None:
            raise DataError(
                "data.transform and data.policy take single images, not whole batches: use loader=prefetch"
            )
        if not (self.pad or self.flip):
            return batch
        images = batch["image"]
        height, width, _ = self.image_shape
        if random is None:
            return {**batch, "image": self._unpadded(images).contiguous()}
        down, right, mirror = random.uniform(3).T
        offsets = 2 * self.pad + 1
        top = (down * offsets).astype(np.int64)
        left = (right * offsets).astype(np.int64)
        is_mirrored = self.flip & (mirror < 0.5)
        top += np.arange(len(top)) * images.shape[1]  # a row number among the rows of all images
        left[is_mirrored] += width - 1  # a mirrored row is read from its end backwards
        starts = torch.from_numpy(np.stack([top, left, np.where(is_mirrored, -1, 1)]))
        if images.is_cuda:
            starts = starts.pin_memory()  # a copy from pageable memory would make the host wait
        first_row, first_column, step = starts.to(images.device, non_blocking=True)[:, :, None]
        rows = first_row + torch.arange(height, device=images.device)
        columns = first_column + step * torch.arange(width, device=images.device)
        pixels = rows[:, :, None] * images.shape[2] + columns[:, None, :]
        # Gathering whole pixels is faster on a CPU than strided windows and a flip, or than an index per dimension.
        crops = images.flatten(0, 2).index_select(0, pixels.flatten())
        return {**batch, "image": crops.view(-1, *self.image_shape)}

    def _unpadded(self, images: Any) -> Any:
        height, width, _ = self.image_shape
        return images[:, self.pad : self.pad + height, self.pad : self.pad + width]

    def _augmented(self, image: np.ndarray, down: float, right: float, mirror: float) -> np.ndarray:
        height, width, _ = self.image_shape
        offsets = 2 * self.pad + 1
        top = int(down * offsets)
        left = int(right * offsets)
        image = image[top : top + height, left : left + width]
        return image[:, ::-1] if self.flip and mirror < 0.5 else image


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
