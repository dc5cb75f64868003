"""Guarded: a dataset that may have damaged samples, none of which raises."""

from typing import Any

import numpy as np
import torch

from data.subset import has_own

LONGEST = 300  # bytes of a reason


class Guarded:
    """The images of `dataset`, uint8 of `shape` (H, W, C), by number: "index", int64 ().

    "reason" is why an image could not be read, as text in uint8 (LONGEST,); all zeros if it could.
    """

    def __init__(self, dataset: Any, shape: tuple[int, ...]) -> None:
        self.dataset, self.shape = dataset, shape
        self._reads_batches = has_own(dataset, "read_batch")

    def __len__(self) -> int:
        return len(self.dataset)

    def sample_spec(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"image": (self.shape, torch.uint8), "index": ((), torch.int64), "reason": ((LONGEST,), torch.uint8)}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        out = {name: torch.empty((1, *shape), dtype=dtype) for name, (shape, dtype) in self.sample_spec().items()}
        self.read_batch(np.array([index]), out, None)
        return {name: tensor[0] for name, tensor in out.items()}

    def read_batch(self, indices: np.ndarray, out: dict[str, torch.Tensor], random: Any) -> None:
        """Writes the samples at `indices` (B,) into the tensors of `out`, one by one. Draws nothing."""
        label = torch.empty(1, dtype=torch.int64)
        for row, index in enumerate(indices.tolist()):
            image, reason = out["image"][row : row + 1], out["reason"][row].zero_()
            out["index"][row] = index
            try:
                if self._reads_batches:
                    self.dataset.read_batch(indices[row : row + 1], {"image": image, "label": label}, random)
                else:
                    image[0] = torch.as_tensor(self.dataset[index]["image"])
            except Exception as error:  # whatever a dataset raises for this sample, the next one may be good
                image.zero_()
                text = (" ".join(str(error).split()) or type(error).__name__).encode(errors="replace")[:LONGEST]
                reason[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def text_of(reason: torch.Tensor) -> str:
    """The text in a sample's "reason"."""
    return bytes(reason.tolist()).rstrip(b"\0").decode(errors="replace")
