"""Fashion-MNIST: 28x28 grey images of ten kinds of clothing (Xiao, Rasul and Vollgraf, arXiv:1708.07747).

FashionMini is the part of it that ships with this repository, FashionMNIST the full set.
"""

import gzip
import hashlib
import lzma
import math
import zlib
from pathlib import Path

import numpy as np

from data.array_dataset import ArrayDataset
from data.download import DEFAULT_ROOT, download
from data.errors import DataError

CLASSES = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]
ABOUT = {"classes": CLASSES, "mean": [0.2860], "std": [0.3530]}  # of the full training set
TRAIN_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST_FILES = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
EMBEDDED = Path(__file__).parent / "embedded"


class FashionMini(ArrayDataset):
    """10,000 training and 2,000 test images of Fashion-MNIST, equally many a class.

    root: the folder with the four .xz files and their SHA256SUMS. None: data/embedded/, which has them.
    pad, flip, policy: see ArrayDataset. Images are uint8 (28, 28, 1).
    Raises DataError when a file is missing or is not the one that SHA256SUMS lists.
    """

    def __init__(
        self, train: bool, root: str | Path | None = None, pad: int = 1, flip: bool = True, policy: str | None = None
    ) -> None:
        root = Path(root or EMBEDDED).expanduser()
        paths = [root / f"{name}.xz" for name in (TRAIN_FILES if train else TEST_FILES)]
        for path in paths:
            verify_checksum(path)
        images, labels = map(read_idx, paths)
        super().__init__(images[..., np.newaxis], labels, train=train, pad=pad, flip=flip, policy=policy, **ABOUT)


class FashionMNIST(ArrayDataset):
    """All 60,000 training and 10,000 test images of Fashion-MNIST.

    root: the folder with the four IDX files (.gz or not), in it or in its FashionMNIST/raw/; if they are in
    neither, torchvision downloads them to the latter. None: downloads/ in the current folder.
    pad, flip, policy: see ArrayDataset. Images are uint8 (28, 28, 1). Raises DataError without files or network.
    """

    def __init__(
        self, train: bool, root: str | Path | None = None, pad: int = 1, flip: bool = True, policy: str | None = None
    ) -> None:
        root = Path(root or DEFAULT_ROOT).expanduser()
        if not find_files(root):
            # Imported here, as it takes a second in every worker that is not forked.
            from torchvision import datasets

            names = ", ".join(f"{name}.gz" for name in TRAIN_FILES + TEST_FILES)
            download(datasets.FashionMNIST, root, names)
        paths = find_files(root)
        images, labels = (read_idx(paths[name]) for name in (TRAIN_FILES if train else TEST_FILES))
        super().__init__(images[..., np.newaxis], labels, train=train, pad=pad, flip=flip, policy=policy, **ABOUT)


def find_files(root: Path) -> dict[str, Path]:
    """Where the four files are, if they are all in `root` or all in its FashionMNIST/raw/; else nothing."""
    names = TRAIN_FILES + TEST_FILES
    for folder in (root, root / "FashionMNIST" / "raw"):
        # The .gz counts where there are both: a download that was cut off may have left half a raw file.
        candidates = [(name, folder / f"{name}{suffix}") for suffix in ("", ".gz") for name in names]
        found = {name: path for name, path in candidates if path.is_file()}
        if len(found) == len(names):
            return found
    return {}


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array, read-only, in a file of the IDX format (that of MNIST): raw, .gz or .xz.

    Raises DataError when the file is missing, truncated, or something else.
    """
    remedy = "put a good copy in its place, or delete it to have it downloaded again"
    try:
        with {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); {remedy}") from error
    # Two zeros, 8 for bytes, the number of dimensions, each dimension in four bytes, and the values.
    start = 4 + 4 * content[3] if len(content) > 4 else 0
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if content[:3] != b"\0\0\x08" or len(content) != start + math.prod(shape):
        raise DataError(f"{path} is not a whole IDX file of bytes; {remedy}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def verify_checksum(path: Path) -> None:
    """Raise DataError unless `path` is the file whose SHA-256 stands in the SHA256SUMS beside it."""
    try:
        lines = (path.parent / "SHA256SUMS").read_text().splitlines()
        listed = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" in lines
        problem = "its SHA-256 is not the one in SHA256SUMS"
    except OSError as error:
        listed, problem = False, error
    if not listed:
        raise DataError(
            f"{path} is not as it was shipped ({problem}); restore it with `git checkout -- data/embedded` "
            f"or make it again with `python scripts/make_fashion_mini.py`"
        )
