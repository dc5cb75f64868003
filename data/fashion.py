"""Fashion-MNIST: 28x28 grey images of ten kinds of clothing (Xiao, Rasul and Vollgraf, arXiv:1708.07747).

FashionMini is the part that ships with this repository, FashionMNIST the full dataset.
"""

import gzip
import lzma
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data.array_dataset import ArrayDataset
from data.download import DEFAULT_ROOT, download
from data.errors import explained, home_path

CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
ABOUT: dict[str, Any] = {"classes": CLASSES, "mean": [0.2860], "std": [0.3530]}  # of the full training set
TRAIN_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST_FILES = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
EMBEDDED = Path(__file__).parent / "embedded"


class FashionMini(ArrayDataset):
    """10,000 training and 2,000 test images of Fashion-MNIST, the same number for each class.

    root: the folder with the four .xz files. None: data/embedded/.
    pad, transform, options: see ArrayDataset.
    Images are uint8 (28, 28, 1). Raises DataError for a missing or damaged file.
    """

    def __init__(
        self,
        train: bool,
        root: str | Path | None = None,
        pad: int = 1,
        transform: Any = ("crop", "flip"),
        **options: Any,
    ) -> None:
        names = TRAIN_FILES if train else TEST_FILES
        images, labels = (read_shipped(home_path(root or EMBEDDED) / f"{name}.xz") for name in names)
        super().__init__(
            images[..., np.newaxis], labels, train=train, pad=pad, transform=transform, **ABOUT, **options
        )


class FashionMNIST(ArrayDataset):
    """All 60,000 training and 10,000 test images of Fashion-MNIST.

    root: the folder with the four IDX files (.gz or not), in it or in its FashionMNIST/raw/. If they are in neither,
    torchvision downloads them into the latter. None: downloads/ in the current folder.
    pad, transform, options: see ArrayDataset.
    Images are uint8 (28, 28, 1). Raises DataError if the download fails.
    """

    def __init__(
        self,
        train: bool,
        root: str | Path | None = None,
        pad: int = 1,
        transform: Any = ("crop", "flip"),
        **options: Any,
    ) -> None:
        root = home_path(root or DEFAULT_ROOT)
        if not find_files(root):
            from torchvision import datasets  # here, because it takes a second in every worker that is spawned

            names = ", ".join(f"{name}.gz" for name in TRAIN_FILES + TEST_FILES)
            download(datasets.FashionMNIST, root, names)
        paths = find_files(root)
        images, labels = (read_idx(paths[name]) for name in (TRAIN_FILES if train else TEST_FILES))
        super().__init__(
            images[..., np.newaxis], labels, train=train, pad=pad, transform=transform, **ABOUT, **options
        )


def find_files(root: Path) -> dict[str, Path]:
    """The paths of the four files, if all are in `root` or all are in its FashionMNIST/raw/; else an empty dict."""
    names = TRAIN_FILES + TEST_FILES
    for folder in (root, root / "FashionMNIST" / "raw"):
        for suffix in (".gz", ""):  # not first the raw files: an interrupted download may have left a part of one
            paths = {name: folder / f"{name}{suffix}" for name in names}
            if all(path.is_file() for path in paths.values()):
                return paths
    return {}


@cache
def read_shipped(path: Path) -> np.ndarray:
    """Reads a file of FashionMini once in a process: the jobs of a sweep share its array, which is read-only."""
    return read_idx(path, "leave out data.root, and restore the files with `git checkout -- data/embedded`")


def read_idx(path: Path, remedy: str = "replace it with a good copy, or delete it to download it again") -> np.ndarray:
    """Reads a file in MNIST's IDX format, raw, .gz or .xz: a uint8 array, read-only.

    Raises DataError if the file is missing, damaged, or has another format. Its sentence ends in `remedy`.
    """
    with explained(f"{path} cannot be read", remedy), OPENERS.get(path.suffix, open)(path, "rb") as file:
        content = file.read()
        # The format: two zeros, 8 for uint8, the number of dimensions, four bytes for each dimension, then the values.
        start = 4 + 4 * content[3]
        shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
        if content[:3] != b"\0\0\x08":
            raise ValueError("it is not an IDX file of uint8 values")
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
