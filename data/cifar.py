"""CIFAR-10: 32x32 colour images of ten kinds of animals and vehicles (Krizhevsky, 2009)."""

from pathlib import Path
from typing import Any

from data.array_dataset import ArrayDataset
from data.download import DEFAULT_ROOT, download
from data.errors import home_path

MEAN = [0.4914, 0.4822, 0.4465]  # of the training set
STD = [0.2470, 0.2435, 0.2616]


class CIFAR10(ArrayDataset):
    """The 50,000 training and 10,000 test images of CIFAR-10.

    root: the folder with cifar-10-batches-py/ or cifar-10-python.tar.gz. If neither is complete, torchvision downloads
    the archive. None: downloads/ in the current folder.
    pad, transform, options: see ArrayDataset.
    Images are uint8 (32, 32, 3). Raises DataError if the download fails.
    """

    def __init__(
        self,
        train: bool,
        root: str | Path | None = None,
        pad: int = 4,
        transform: Any = ("crop", "flip"),
        **options: Any,
    ) -> None:
        # Imported here, because it takes a second in every worker that is spawned.
        from torchvision import datasets

        root = home_path(root or DEFAULT_ROOT)
        try:
            source = datasets.CIFAR10(root, train=train)
        except RuntimeError:  # missing or damaged
            download(datasets.CIFAR10, root, datasets.CIFAR10.filename)
            source = datasets.CIFAR10(root, train=train)
        about = {"classes": source.classes, "mean": MEAN, "std": STD}
        super().__init__(source.data, source.targets, train=train, pad=pad, transform=transform, **about, **options)
