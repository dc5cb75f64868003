"""A mixture: few images with right labels, in folders, and many whose labels may be wrong, in a table.

python -m examples.mixture.noisy DIR    # makes both from the images that ship with the repository
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from data.fashion import FashionMini


def write(folder: Path, clean: int = 20, noisy: int = 100, wrong: float = 0.3) -> None:
    """Writes folder/train and folder/val with `clean` images per class, and folder/noisy.csv with `noisy`."""
    random = np.random.default_rng(0)
    rows = [["image", "label"]]
    for split, images in (("train", FashionMini(True).without_augmentation()), ("val", FashionMini(False))):
        names = [name.replace("/", " ") for name in images.classes[:4]]
        for number, name in enumerate(names):
            for place, index in enumerate(np.flatnonzero(images.labels == number)[: clean + noisy]):
                is_clean = place < clean
                path = folder / (split if is_clean else "noisy") / name / f"{index}.png"
                if is_clean or split == "train":
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(images.images[index].repeat(3, axis=2)).save(path)
                if not is_clean and split == "train":
                    label = random.choice(names) if random.random() < wrong else name
                    rows.append([str(path.relative_to(folder)), label])
    with open(folder / "noisy.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
