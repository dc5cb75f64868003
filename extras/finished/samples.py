"""Samples to predict: what a network needs of each, from image files or from a dataset; labels are not read."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import default_collate

from data import optional
from data.errors import DataError, explained, read_lines, reason_of
from data.image_folder import find_images, warn_of_left_out
from data.images.decoders import decoders_for
from data.images.decoding import decode, image_errors, whole
from data.subset import undivided
from data.transform import as_array
from extras.finished.finished_run import FinishedRun
from extras.finished.new_images import NewImages
from loaders import offers
from training.config import ConfigError

TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
Inputs = dict[str, Any]  # of a sample, or of a batch, by name
Sample = tuple[str, Inputs, str]  # its name, its inputs, and why it cannot be read, or ""


class Samples:
    """A dataset that yields for each sample its name, its inputs and, if it cannot be read, the reason."""

    def __init__(self, names: Sequence[str], read: Callable[[int], Inputs]) -> None:
        self._names = np.array([os.fsencode(name) for name in names])  # forked workers share arrays
        self._read = read

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Sample:
        name = os.fsdecode(self._names[index])
        try:
            return name, self._read(index), ""
        except Exception as error:  # whatever the dataset raises: other samples may be readable
            return name, {}, reason_of(error)


class ImageFiles:
    """Reads image files, and prepares them as the run's dataset prepares images: see data/__init__.py."""

    def __init__(self, run: FinishedRun, paths: Sequence[str]) -> None:
        if len(run.task.inputs) > 1:
            raise ConfigError(f"the network needs {', '.join(run.task.inputs)}: files give one image, so use --split")
        self._name = run.task.inputs[0]
        self._is_grey = run.data.model_options.get("in_channels") == 1
        self._paths = paths
        self._prepare = run.data.prepare if isinstance(run.data, NewImages) else prepare_of(run.data.test)
        self._decoders = decoders_for("auto")

    def __call__(self, index: int) -> Inputs:
        path = self._paths[index]
        with image_errors(path):
            pixels = decode(Path(path).read_bytes(), whole, decoders=self._decoders)
        image = as_array(pixels)
        if self._is_grey:
            grey = Image.fromarray(image).convert("L")
            image = np.array(grey)[..., np.newaxis]
        with explained(
            f"the dataset's prepare(image) failed for {image.dtype} {image.shape}",
            "it gets the image alone, uint8 (H, W, C), and returns what the network gets of it",
        ):
            return {self._name: self._prepare(image)}


def prepare_of(samples: Any) -> Callable[[np.ndarray], Any]:
    """The dataset's `prepare`: see data/__init__.py."""
    dataset = undivided(samples)
    if not offers(dataset, "prepare") or optional(dataset, "prepare") is None:
        raise ConfigError(
            f"{type(dataset).__name__} has no method prepare(image), which new images need; add it to the class that "
            "has its __getitem__, which calls it"
        )
    return dataset.prepare


def read_inputs(names: Sequence[str], dataset: Any, index: int) -> Inputs:
    """The inputs of a dataset's sample, without its label."""
    sample = dataset[index]
    if not isinstance(sample, dict):
        sample = dict(zip(names, sample, strict=False))  # the label comes last
    for name in names:
        if name not in sample:
            raise DataError(f"a sample has no {name}: does data.collate make it? predict.py makes its own batches")
    return {name: sample[name] for name in names}


def batches_of(samples: list[Sample]) -> list[tuple[list[int], Inputs]]:
    """Batches of the readable samples, with their rows: one batch if all inputs have equal shapes, else one each."""
    readable = {row: inputs for row, (_, inputs, reason) in enumerate(samples) if not reason}
    shapes = {tuple(np.shape(value) for value in inputs.values()) for inputs in readable.values()}
    groups = [list(readable)] if len(shapes) == 1 else [[row] for row in readable]
    return [(rows, default_collate([readable[row] for row in rows])) for rows in groups]


def name_of(dataset: Any, index: int) -> str:
    """The name that the dataset gives the sample, such as its file; else the sample's index in the whole dataset."""
    path = optional(dataset, "path")
    return str(index if path is None else path(index))


def image_files(inputs: Sequence[str]) -> list[str]:
    """The paths that `inputs` name, each once. An input is an image, a folder, or a .txt file with a path per line.

    A folder stands for all images in it and its subfolders, as data=image_folder finds them.
    Raises DataError if an input does not exist.
    """
    paths: list[str] = []
    for name in inputs:
        if not os.path.exists(name):
            raise DataError(f"{name} does not exist: give image files, folders or .txt files of paths")
        if os.path.isdir(name):
            images, others, _ = find_images(name)
            warn_of_left_out(name, others)
            paths += [os.path.join(name, image) for image in images]
        elif name.endswith(".txt"):
            paths += read_lines("", name, "surrogateescape")
        elif name.lower().endswith(TABLES):
            raise DataError(
                f"{name} is no image: give a .txt file with a path per line, or the table by data.test_table"
            )
        else:
            paths.append(name)
    return list(dict.fromkeys(paths))
