"""CroppedStream: crops of images that come in the order of their files, instead of a random one."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from data.errors import DataError
from data.images.crops import CroppedDataset


class CroppedStream(IterableDataset[dict[str, torch.Tensor]]):
    """The samples that a CroppedDataset with the arguments `crops` makes of the images of `encoded`.

    classes: their names. A label is one of them, or the number of one.
    """

    mean, std = CroppedDataset.mean, CroppedDataset.std

    def __init__(self, train: bool, classes: Sequence[str] | None, **crops: Any) -> None:
        if not classes:
            raise DataError(
                "data.classes is not set: a stream does not look for the classes; set it to all their names"
            )
        self.train, self.dataset, self.classes = train, CroppedDataset(train, **crops), tuple(map(str, classes))
        if self.dataset.decode_on == "device":
            raise DataError("data.decode_on=device: workers decode the samples of a stream: set it to workers")

    def encoded(self) -> Iterator[tuple[bytes, str, Any]]:
        """Yields the bytes of an image file, its name for errors, and its label: the share of torch's worker."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        known = {name: number for number, name in enumerate(self.classes)}
        known |= {str(number): number for number in known.values()}
        for data, name, label in self.encoded():
            if str(label) not in known:
                raise DataError(f"{name} has the label {label}, which is not one of the {len(self.classes)} classes")
            yield self.dataset.sample(partial(self.dataset.decoded, data, name), known[str(label)])
