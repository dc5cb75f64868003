"""Download a public dataset through torchvision, or say what to do where there is no network."""

import tarfile
import zlib
from pathlib import Path

from filelock import FileLock  # comes with torch

from data.errors import DataError

DEFAULT_ROOT = "downloads"  # in the folder that the program was started in


def download(dataset: type, root: Path, files: str) -> None:
    """Let the torchvision class `dataset` download into `root`, with its progress bar.

    Raises DataError where that fails: the sentence asks for `files` to be put into `root`.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Of a machine's processes the first one downloads; the others wait, and then find its files.
        with FileLock(root / ".download.lock"):
            dataset(root, download=True)
    except (OSError, RuntimeError, EOFError, tarfile.TarError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{dataset.__name__} could not be downloaded ({reason}); put {files} into {root.resolve()}, "
            f"or name the folder that has what is needed with data.root=FOLDER"
        ) from error
