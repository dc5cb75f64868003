"""Guarded: a dataset that may have damaged samples, none of which raises."""

from typing import Any

import torch

LONGEST = 300  # bytes of a reason


class Guarded:
    """The images of `dataset`, uint8 of `shape` (H, W, C), by number: "index", int64 ().

    "reason" is why an image could not be read, as text in uint8 (LONGEST,); all zeros if it could.
    """

    def __init__(self, dataset: Any, shape: tuple[int, ...]) -> None:
        self.dataset, self.shape = dataset, shape

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        reason = torch.zeros(LONGEST, dtype=torch.uint8)
        try:
            image = self.dataset[index]["image"]
        except Exception as error:  # whatever a dataset raises for this sample, the next one may be good
            image = torch.zeros(self.shape, dtype=torch.uint8)
            text = (" ".join(str(error).split()) or type(error).__name__).encode(errors="replace")[:LONGEST]
            reason[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return {"image": image, "index": torch.tensor(index), "reason": reason}


def text_of(reason: torch.Tensor) -> str:
    """The text in a sample's "reason"."""
    return bytes(reason.tolist()).rstrip(b"\0").decode(errors="replace")
