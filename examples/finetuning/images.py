"""Fine-tuning on a folder of images whose classes are not equally frequent: a balanced sampler, and an early stop.

python -m examples.finetuning.images DIR    # makes such a folder, of images that ship with the repository
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import WeightedRandomSampler

from data.fashion import FashionMini


def balanced(labels: np.ndarray) -> WeightedRandomSampler:
    """Draws each class as often as any other, with replacement. The loader seeds torch's generator for each epoch.

    labels: integers (N,), those of the training set, which the dataset has as `labels`.
    """
    classes = torch.as_tensor(labels)
    weights = 1 / torch.bincount(classes).clamp(min=1)
    return WeightedRandomSampler(weights[classes].tolist(), len(classes))


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
