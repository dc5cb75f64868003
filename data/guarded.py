"""Guarded: a dataset that may have damaged images, and gives the reason instead of raising."""

from typing import Any

import numpy as np
import torch

from data.errors import DataError
from data.subset import offers

REASON_BYTES = 300


class Guarded:
    """A dataset of the images of `dataset`, without labels.

    A sample has "image", uint8 of `shape` (H, W, C), "index", int64 (), and "reason": why the image cannot be read, as
    the bytes of a text, uint8 (REASON_BYTES,), or all zeros. An image that cannot be read is black.
    """

    def __init__(self, dataset: Any, shape: tuple[int, ...]) -> None:
        self.dataset, self.shape = dataset, shape
        self._reads_batches = offers(dataset, "read_batch")

    def __len__(self) -> int:
        return len(self.dataset)

    def sample_spec(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        reason = ((REASON_BYTES,), torch.uint8)
        return {"image": (self.shape, torch.uint8), "index": ((), torch.int64), "reason": reason}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        out = empty_sample(self)
        self.read_batch(np.array([index]), out, None)
        return {name: tensor[0] for name, tensor in out.items()}

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        """Writes the samples at `indices` (B,) into the tensors of `out`, one at a time."""
        others = empty_sample(self.dataset) if self._reads_batches else {}  # read_batch writes all fields
        for row, index in enumerate(indices.tolist()):
            image, reason = out["image"][row : row + 1], out["reason"][row].zero_()
            out["index"][row] = index
            try:
                if self._reads_batches:
                    self.dataset.read_batch(indices[row : row + 1], {**others, "image": image}, random)
                else:
                    image[0] = self._checked(torch.as_tensor(self.dataset[index]["image"]))
            except Exception as error:  # whatever the dataset raises: the other images may be readable
                image.zero_()
                text = (" ".join(str(error).split()) or type(error).__name__).encode(errors="replace")[:REASON_BYTES]
                reason[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def _checked(self, image: torch.Tensor) -> torch.Tensor:
        """Returns the image. Raises DataError if it has another shape or dtype: an assignment would convert it."""
        if image.dtype != torch.uint8 or tuple(image.shape) != tuple(self.shape):
            raise DataError(
                f"the network takes images of torch.uint8 {tuple(self.shape)}, and the dataset made {image.dtype} "
                f"{tuple(image.shape)} of this one"
            )
        return image


def empty_sample(dataset: Any) -> dict[str, torch.Tensor]:
    """Memory for a batch of one sample of a dataset with `sample_spec`."""
    return {name: torch.empty((1, *shape), dtype=dtype) for name, (shape, dtype) in dataset.sample_spec().items()}


def text_of(reason: torch.Tensor) -> str:
    """The text in a sample's "reason"."""
    return bytes(reason.tolist()).rstrip(b"\0").decode(errors="replace")
