"""CIFAR-10: 32x32 colour images of ten kinds of animals and vehicles (Krizhevsky, 2009)."""

from pathlib import Path

import numpy as np

from data.array_dataset import ArrayDataset
from data.download import DEFAULT_ROOT, download

ABOUT = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}  # of the training set


class CIFAR10(ArrayDataset):
    """The 50,000 training and 10,000 test images of CIFAR-10.

    root: the folder with cifar-10-batches-py/ or cifar-10-python.tar.gz; if neither is there and whole,
    torchvision downloads the latter. None: downloads/ in the current folder.
    pad, flip, policy: see ArrayDataset. Images are uint8 (32, 32, 3). Raises DataError without files or network.
    """

    def __init__(
        self, train: bool, root: str | Path | None = None, pad: int = 4, flip: bool = True, policy: str | None = None
    ) -> None:
        # Imported here, as it takes a second in every worker that is not forked.
        from torchvision import datasets

        root = Path(root or DEFAULT_ROOT).expanduser()
        try:
            source = datasets.CIFAR10(root, train=train)
        except RuntimeError:  # not there, or broken
            download(datasets.CIFAR10, root, datasets.CIFAR10.filename)
            source = datasets.CIFAR10(root, train=train)
        images, labels, classes = source.data, np.array(source.targets), source.classes
        super().__init__(images, labels, classes=classes, train=train, pad=pad, flip=flip, policy=policy, **ABOUT)
