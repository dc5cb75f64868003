"""Downloads a public dataset with torchvision, or says what to do if there is no network."""

from pathlib import Path
from typing import Any

from filelock import FileLock  # comes with torch

from data.errors import explained

DEFAULT_ROOT = "downloads"  # in the current folder


def download(dataset: type[Any], root: Path, files: str) -> None:
    """Downloads `dataset`, a class of torchvision, into `root`, with a progress bar.

    Raises DataError if that fails. Its sentence asks the user to put `files` into `root`.
    """
    remedy = f"put {files} into {root.resolve()}, or set data.root=FOLDER to a folder that has them"
    with explained(f"{dataset.__name__} could not be downloaded", remedy):
        root.mkdir(parents=True, exist_ok=True)
        # The first process on a machine downloads. The others wait for it, and then find its files.
        with FileLock(root / ".download.lock"):
            dataset(root, download=True)
