"""ImageFiles: any image files, prepared for a trained network as its dataset prepares images.

BlackIfDamaged: the images of a dataset or of such files, some of which may be damaged.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from data.errors import DataError, explained
from data.image_folder import SUFFIXES
from data.images.decoders import choose
from data.images.decoding import decode, image_errors, whole


class ImageFiles:
    """The images in the files `paths`, without labels: {"image": what `prepare` returns}.

    prepare: takes the pixels of a file, uint8 (H, W, channels), upright; see data/__init__.py.
    channels: 1 for grey images or 3 for RGB. Raises DataError for another number, when it reads a file that is not an
    image, and if `prepare` fails.
    """

    def __init__(self, paths: Sequence[str], prepare: Callable[[np.ndarray], Any], channels: int) -> None:
        if channels not in (1, 3):
            raise DataError(f"the network takes images of {channels} channels; image files can only give 1 or 3")
        self._prepare, self._channels, self._decoders = prepare, channels, choose("auto")
        self._paths = np.array([os.fsencode(path) for path in paths])  # an array, because forked workers share it

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> str:
        return os.fsdecode(self._paths[index])

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.path(index)
        with image_errors(path):
            pixels = decode(Path(path).read_bytes(), whole, decoders=self._decoders)
        image = pixels.permute(1, 2, 0).contiguous().numpy()
        if self._channels == 1:
            image = np.array(Image.fromarray(image).convert("L"))[..., np.newaxis]
        with explained(f"prepare(image) cannot take {path}", "change prepare, or leave the image out"):
            return {"image": self._prepare(image)}


class BlackIfDamaged:
    """The images of `dataset`, uint8 of `shape` (H, W, C), without labels. Those that cannot be read are black.

    A sample has "image", "index", and "reason": why the image cannot be read, or "".
    """

    def __init__(self, dataset: Any, shape: tuple[int, ...]) -> None:
        self.dataset, self.shape = dataset, tuple(shape)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return {"image": self._image(index), "index": index, "reason": ""}
        except Exception as error:  # whatever the dataset raises: the other images may be readable
            reason = " ".join(str(error).split()) or type(error).__name__
            return {"image": torch.zeros(self.shape, dtype=torch.uint8), "index": index, "reason": reason}

    def _image(self, index: int) -> torch.Tensor:
        """Reads an image. Raises DataError if it has another shape or dtype, which writing it would convert."""
        sample = self.dataset[index]
        image = torch.as_tensor(sample["image"] if isinstance(sample, dict) else sample[0])
        if image.dtype != torch.uint8 or tuple(image.shape) != self.shape:
            raise DataError(
                f"the network takes images of torch.uint8 {self.shape}, and the dataset made {image.dtype} "
                f"{tuple(image.shape)} of this one"
            )
        return image


def image_files(inputs: Sequence[str]) -> list[str]:
    """The paths that `inputs` name, each once. An input is an image, a folder, or a .txt file with a path per line.

    A folder stands for all images below it, sorted: files with one of SUFFIXES that are not hidden.
    Raises DataError if an input does not exist or has no images.
    """
    found: list[str] = []
    for given in inputs:
        if os.path.isdir(given):
            files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(given) for name in names)
            paths = [path for path in files if path.lower().endswith(SUFFIXES) and "/." not in path[len(given) :]]
        elif not os.path.exists(given):
            raise DataError(f"{given} does not exist: give image files, folders or .txt files of paths")
        else:
            lines = Path(given).read_text(errors="surrogateescape").split("\n") if given.endswith(".txt") else [given]
            paths = [line for line in lines if line.strip()]
        if not paths:
            raise DataError(f"{given} names no images ({', '.join(SUFFIXES)}): give other files or folders")
        found += paths
    return list(dict.fromkeys(found))
