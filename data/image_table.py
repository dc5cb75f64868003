"""ImageTable: image files that a table names, with their labels."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, check_choice, printable
from data.image_folder import ImageFiles
from data.images.crops import class_indices
from data.table import read_table

SPLITS = ("train", "val", "test")
TRUTH = {"true": "1", "false": "0"}


class ImageTable(ImageFiles):
    """The images that a table names (data/table.py) in the column `image`: paths in `root`, or in the table's folder.

    label: a column of texts or whole numbers, which are classes; of other numbers, or with `numbers`, for
    task=regression; or a list of columns: of 0 and 1 for task=multilabel, whose classes they are, else of numbers.
    split: a column with train, val or test. Without test rows, val rows are the test set, else those to validate on.
    test_table: the file of the test set. With neither of them there is no test set: see data.val_fraction.
    group: a column: rows with the same value, such as a patient, are never in two parts.
    Classes are those of the training rows. For samples and the arguments in `crops` see CroppedDataset. Raises
    DataError, with the number of the row, for a table that cannot be used, and for files that do not exist.
    """

    is_val: np.ndarray | None = None  # bool (N,): the training samples that the table has for validation
    val_groups: np.ndarray | None = None  # (N,): data.val_fraction takes all samples of a group, or none

    def __init__(
        self,
        train: bool,
        table: str | Path | None = None,
        image: str = "image",
        label: str | Sequence[str] = "label",
        root: str | Path | None = None,
        split: str | None = None,
        test_table: str | Path | None = None,
        group: str | None = None,
        numbers: bool = False,
        **crops: Any,
    ) -> None:
        super().__init__(train, **crops)
        if not table:
            raise DataError("data.table is not set; set it to a .csv, .json or .parquet file with a row per image")
        is_list = not isinstance(label, str | int)
        names = [str(name) for name in (label if is_list else [label])]
        added = [str(name) for name in (split, group) if name is not None]
        path = Path(table).expanduser()
        rows = read_table(path, [str(image), *names, *added])
        labels = slice(2, 2 + len(names))
        parts = np.full(len(rows), "train") if split is None else rows[:, labels.stop]
        for number, part in zip(rows[:, 0], parts, strict=True):
            check_choice(f"{path}, row {number}: {split}", part, SPLITS)
        is_train = parts == "train"
        training = rows[is_train, labels]
        if not len(training):
            raise DataError(f"{path} has no row with {split}=train: there is nothing to train on")
        if group is not None and (shared := {*rows[is_train, -1]} & {*rows[~is_train, -1]}):
            raise DataError(f"{path}: {group}={min(shared)} is in training rows and in others; put it into one part")

        is_tested = parts == ("test" if test_table or "test" in parts else "val")
        chosen = (is_train | (parts == "val") & ~is_tested) if train else is_tested
        rows, is_val = rows[chosen], parts[chosen] == "val"
        if train and is_val.any():
            self.is_val = is_val
        if train and group is not None:
            self.val_groups = np.unique(rows[:, -1], return_inverse=True)[1]
        if test_table and not train:
            path = Path(test_table).expanduser()
            rows = read_table(path, [str(image), *names])

        def where(row: int) -> str:
            return f"{path}, row {rows[row, 0]}"

        classes = None if numbers or is_list else class_names(training[:, 0])
        if classes is not None:
            remedy = "correct it, or add a training row with this label"
            self.labels = class_indices(rows[:, 2].astype(str), np.array(classes), where, remedy)
            self.fits_task = "classification"
        else:
            values = np.array([number_of(text) for text in rows[:, labels].flat], np.float32).reshape(-1, len(names))
            for row, column in np.argwhere(~np.isfinite(values)):
                text = rows[row, 2 + column]
                raise DataError(f"{where(row)}: {names[column]!r} is {text}, not a finite number; correct it")
            self.labels = values if is_list else values[:, 0]
            is_multilabel = is_list and {number_of(text) for text in training.flat} <= {0, 1}
            self.fits_task = "multilabel" if is_multilabel else "regression"
            classes = names if is_multilabel else []
        self.classes = tuple(classes)

        self.folder = Path(root).expanduser() if root else path.parent
        # Bytes in an array, because forked workers share it, and any encoding fits.
        self.files = np.array([os.fsencode(name) for name in rows[:, 1]], dtype=bytes)
        files_in = cache(lambda folder: {*os.listdir(folder)} if os.path.isdir(folder) else set())  # one call a folder
        paths = [os.path.split(self.path(row)) for row in range(len(rows))]
        missing = [row for row, (folder, name) in enumerate(paths) if name not in files_in(folder)]
        if missing:
            name, count = printable(self.path(missing[0])), f"{len(missing)} of {len(rows)} files are missing"
            raise DataError(f"{where(missing[0])}: {name} does not exist ({count}); set data.root, or remove the rows")
        if len(rows):
            self.open_cache()

    def path(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.files[index]))


def class_names(texts: np.ndarray) -> list[str] | None:
    """The classes, sorted; None for numbers that are not all whole."""
    names = sorted(set(texts))
    if all(name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=int)
    try:
        list(map(float, names))
    except ValueError:
        return names
    return None


def number_of(text: str) -> float:
    """NaN if it is not a number."""
    try:
        return float(TRUTH.get(text.lower(), text))
    except ValueError:
        return float("nan")
