"""Small datasets, and fakes of the public ones' files, so that no test needs a network."""

import pickle
import struct

import numpy as np
from PIL import Image

from data.array_dataset import ArrayDataset


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def noise(*shape, seed=0):
    """Random pixels, uint8."""
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


class Foreign:
    """A dataset of someone else: samples (index, index % 2), and whatever attributes it is given."""

    count = 6

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index, index % 2


def arrays(train=True, images=None, labels=None, classes="ab", count=20, size=(12, 10, 3), **options):
    """An ArrayDataset of random images, whose training images are cropped and mirrored."""
    images = noise(count, *size) if images is None else images
    labels = np.arange(len(images)) % len(classes) if labels is None else labels
    half = [0.5] * images.shape[-1]
    about = {"mean": half, "std": half, "pad": 2, "transform": ["crop", "flip"], **options}
    return ArrayDataset(images, labels, classes=classes, train=train, **about)


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_fashion(folder):
    """The four files of Fashion-MNIST with two images per class. All pixels of image i have the value i."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "t10k"):
        numbers = np.arange(20, dtype=np.uint8)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(numbers.repeat(28 * 28).reshape(-1, 28, 28)))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(numbers % 10))
    return folder


def write_cifar(root):
    """cifar-10-batches-py with ten images per file. All pixels of image i are (i, 100, 200)."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels = np.stack([np.repeat([i, 100, 200], 32 * 32) for i in range(10)]).astype(np.uint8)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": list(range(10))}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"name {i}" for i in range(10)]}))
    return root


def write_images(root, classes=("cat", "dog"), count=2):
    """root/train and root/val with `count` JPEG files per class, each of another colour."""
    for split in ("train", "val"):
        for number, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (60, 40), (10 * i % 256, 80, 160 - 90 * number)).save(folder / f"{i}.jpg")
    return root


def write_table(root):
    """A table of the files of `write_images`: half of those in val/ are for the test."""
    files = sorted(path.relative_to(root) for path in root.glob("*/*/*.jpg"))
    rows = ["image,label,patient,age,split"]
    for number, path in enumerate(files):
        split = "test" if path.parts[0] == "val" and number % 2 else path.parts[0]
        rows.append(f"{path},{path.parts[1]},{path.parent}{number // 3},{number / 7 + 0.5},{split}")
    table = root / "photos.csv"
    table.write_text("\n".join(rows))
    return table
