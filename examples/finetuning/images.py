"""Fine-tuning on images whose classes differ in size: a balanced sampler, unfreezing, and an early stop.

python -m examples.finetuning.images DIR    # makes such a folder from the images that ship with the repository
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data.fashion import FashionMini

BLOCK = 4096  # samples that are drawn together


class Balanced:
    """Draws each class as often as any other, with replacement. The loader seeds torch's generator for each epoch.

    labels: the `labels` of the training set, integers (N,). It draws a class, and then one of its samples: torch's
    WeightedRandomSampler takes at most 2^24 weights.
    """

    def __init__(self, labels: np.ndarray) -> None:
        classes = torch.as_tensor(labels)
        self.order = classes.argsort()
        counts = torch.bincount(classes)
        self.counts = counts[counts > 0]
        self.starts = self.counts.cumsum(0) - self.counts

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        for block in range(0, len(self), BLOCK):
            size = min(BLOCK, len(self) - block)
            classes = torch.randint(len(self.counts), (size,))
            places = (torch.rand(size, dtype=torch.float64) * self.counts[classes]).long()
            yield from self.order[self.starts[classes] + places].tolist()


balanced = Balanced  # the settings of earlier runs, which a resume reads, have this name


def write(folder: Path, most: int = 200, classes: int = 4) -> None:
    """Writes folder/train/CLASS/*.png and folder/val/CLASS/*.png; each class has half as many as the one before."""
    for split, images in (("train", FashionMini(True).without_augmentation()), ("val", FashionMini(False))):
        for number, name in enumerate(images.classes[:classes]):
            path = folder / split / name.replace("/", " ")
            path.mkdir(parents=True, exist_ok=True)
            count = most // 2**number if split == "train" else most // 8
            for index in np.flatnonzero(images.labels == number)[:count]:
                Image.fromarray(images.images[index].repeat(3, axis=2)).save(path / f"{index}.png")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
