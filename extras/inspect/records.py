"""Records: what is known about each sample of a dataset, after reading it once as training does."""

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image

from data import optional
from data.classes import label_text
from data.errors import DataError, printable, reason_of
from data.images.crops import CroppedDataset
from data.images.decoding import whole
from data.subset import unaugmented
from data.transform import ImageDataset

ENLARGED = 4  # an image is very small if the network gets it enlarged by more than this
LONG = 5  # an image is very long if one side is more than this times the other: a square crop shows little of it


class File(NamedTuple):
    """What an image file says about itself. format, mode: Pillow's names, such as JPEG and CMYK."""

    format: str = ""
    mode: str = ""
    is_rotated: bool = False
    is_transparent: bool = False


class Record(NamedTuple):
    """A sample. error: why it cannot be read, or "".

    width, height: pixels of the stored image when it is upright; 0 if it is not an image.
    digest: a hash of the stored values; samples are the same if they are equal.
    moments: the means of each channel and of its square (2, C), for pixels scaled to 0..1; None unless they are uint8.
    """

    number: int
    name: str
    label: str
    error: str = ""
    file: File = File()
    width: int = 0
    height: int = 0
    is_small: bool = False
    is_long: bool = False
    digest: str = ""
    moments: np.ndarray | None = None


class Records:
    """A dataset with the Record of each sample of `dataset`.

    inputs, label: the names of a sample's fields, as in conf/task/. `image_of` looks at the first of the inputs.
    """

    def __init__(self, dataset: Any, inputs: Sequence[str], label: str | None) -> None:
        self.dataset = dataset
        self.fields = [*inputs, *([label] if label else [])]
        self.input = inputs[0]
        self.label = label
        self.classes = optional(dataset, "classes") or ()
        self._plain = unaugmented(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Record:
        path = optional(self.dataset, "path")
        name = printable(str(index if path is None else path(index)))
        try:
            return self._read(index, name)
        except Exception as error:  # whatever the dataset raises
            labels = optional(self.dataset, "labels")
            label = "" if labels is None else label_text(labels[index], self.classes)
            return Record(index, name, label, reason_of(error))

    def _read(self, index: int, name: str) -> Record:
        file = File()
        if isinstance(self._plain, ImageDataset):  # decodes the whole image once, where a sample would decode a crop
            if isinstance(self._plain, CroppedDataset):
                content, of = self._plain.encoded(index)
                pixels = self._plain.decoded(content, of, whole, inf)
                file = about(content)
            else:
                pixels = self._plain.whole(index)
            stored: Any = pixels.permute(1, 2, 0)
            value: Any = self.dataset.transformed(pixels, self.dataset.transform, name)
            label = self.dataset.labels[index]
        else:
            value, label = self.value_and_label(self.dataset[index])
            stored = value if self._plain is self.dataset else self.value_and_label(self._plain[index])[0]
        record = Record(index, name, label_text(label, self.classes), "", file, digest=digest_of(stored))
        image = image_of(value)
        original = image_of(stored)
        if image is None or original is None:
            return record
        height, width = original.shape[:2]
        sides = sorted([height, width])
        record = record._replace(
            height=height,
            width=width,
            is_small=ENLARGED * sides[0] < min(image.shape[:2]),
            is_long=LONG * sides[0] < sides[1],
        )
        if image.dtype != np.uint8:
            return record
        scaled = image.reshape(-1, image.shape[2]).astype(np.float32) / 255
        return record._replace(moments=np.stack([scaled.mean(0), np.square(scaled).mean(0)]))

    def value_and_label(self, sample: Any) -> tuple[Any, Any]:
        """The first input and the label of a sample, which is a mapping, or has its fields in order."""
        fields = sample if isinstance(sample, Mapping) else dict(zip(self.fields, sample, strict=False))
        for name in (self.input, self.label):
            if name and name not in fields:
                names = ", ".join(map(str, fields))
                raise DataError(f"a sample has no {name!r}, only {names}: set task.inputs or task.label")
        return fields[self.input], fields[self.label] if self.label else None


def about(content: Any) -> File:
    """What the bytes of an image file say; nothing about pixels that the dataset has stored instead."""
    if isinstance(content, bytes):
        with suppress(Exception), Image.open(io.BytesIO(content)) as file:  # a decoder may know more than Pillow
            orientation = file.getexif().get(ExifTags.Base.Orientation, 1)
            is_rotated = orientation in range(2, 9)
            return File(str(file.format), file.mode, is_rotated, file.has_transparency_data)
    return File()


def image_of(value: Any) -> np.ndarray | None:
    """The value as an array (H, W, C), if it is an image: uint8 (H, W, C), or floats (C, H, W)."""
    array = np.asarray(value) if isinstance(value, np.ndarray | torch.Tensor) else np.empty(0)
    if array.ndim != 3:
        return None
    return array if array.dtype == np.uint8 else np.moveaxis(array, 0, 2)


def digest_of(value: Any) -> str:
    if not isinstance(value, np.ndarray | torch.Tensor):
        return blake2b(repr(value).encode(errors="surrogateescape"), digest_size=16).hexdigest()
    array = np.ascontiguousarray(value)
    digest = blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
    digest.update(array.data if array.size else b"")
    return digest.hexdigest()
