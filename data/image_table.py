"""ImageTable: image files that a table names, with their labels."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, check_choice, printable
from data.image_folder import ImageFiles
from data.images.crops import class_indices
from data.table import read_table

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
TRUTH = {"true": "1", "false": "0"}


class ImageTable(ImageFiles):
    """The images that a table names (data/table.py) in the column `image`: paths in `root`, or in the table's folder.

    label: a column of texts or whole numbers, which are classes; of other numbers, for task=regression (with `numbers`
    also whole ones); or a list of columns: of 0 and 1, which are classes for task=multilabel, or else of numbers.
    split: a column with train, val or test. If no row has test, the rows with val are the test set; else they are the
    validation set. test_table: the file of the test set. Without both the test set is empty: see data.val_fraction.
    group: a column, such as a patient: rows with the same value are never separated.
    Classes are those of the training rows. For samples and the arguments in `crops` see CroppedDataset. Raises
    DataError, with the number of the row, for a table that cannot be used, and for files that do not exist.
    """

    is_val: np.ndarray | None = None  # bool (N,), see data.subset.split
    val_groups: np.ndarray | None = None  # (N,), the same

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
        label_columns = [str(name) for name in (label if is_list else [label])]
        columns = [str(image), *label_columns]
        path = Path(table).expanduser()
        rows = read_table(path, columns + [str(name) for name in (split, group) if name is not None])
        labels = slice(2, 2 + len(label_columns))
        parts = np.full(len(rows), "train")
        if split is not None:
            parts = rows[:, labels.stop]
            for number, part in zip(rows[:, 0], parts, strict=True):
                check_choice(f"{path}, row {number}: {split}", part, SPLITS)
        is_train = parts == "train"
        training = rows[is_train, labels]
        if not len(training):
            raise DataError(f"{path} has no row with {split}=train: there is nothing to train on")
        if group is not None:
            shared = {*rows[is_train, -1]} & {*rows[~is_train, -1]}
            if shared:
                example = f"{group}={min(shared)}"
                raise DataError(f"{path}: {example} is in training rows and in others; put it into one part")

        has_test = bool(test_table) or "test" in parts
        is_test = parts == ("test" if has_test else "val")
        chosen = ~is_test if train else is_test
        rows = rows[chosen]
        if train:
            is_val = parts[chosen] == "val"
            if is_val.any():
                self.is_val = is_val
            if group is not None:
                self.val_groups = np.unique(rows[:, -1], return_inverse=True)[1]
        elif test_table:
            path = Path(test_table).expanduser()
            rows = read_table(path, columns)

        def where(row: int) -> str:
            return f"{path}, row {rows[row, 0]}"

        classes = None
        if not numbers and not is_list:
            classes = class_names(training[:, 0])
        if classes is not None:
            self.fits_task = "classification"
            remedy = "correct it, or add a training row with this label"
            self.labels = class_indices(rows[:, 2].astype(str), np.array(classes), where, remedy)
            texts, counts = np.unique(training[:, 0], return_counts=True)
            rare = texts[counts == 1]
            if train and len(rare):
                sentence = "%s: classes with a single training row: %d, such as %r: a misspelling?"
                log.warning(sentence, path, len(rare), str(rare[0]))
        else:
            values = np.array([number_of(text) for text in rows[:, labels].flat], np.float32)
            values = values.reshape(-1, len(label_columns))
            for row, column in np.argwhere(~np.isfinite(values)):
                name, text = label_columns[column], rows[row, 2 + column]
                raise DataError(f"{where(row)}: {name!r} is {text}, not a finite number; correct it")
            self.fits_task = "regression"
            self.labels = values if is_list else values[:, 0]
            if is_list and {number_of(text) for text in training.flat} <= {0, 1}:
                self.fits_task = "multilabel"
                classes = label_columns
        self.classes = tuple(classes or ())

        self.folder = Path(root).expanduser() if root else path.parent
        # Bytes in an array, because forked workers share it, and file names need not be UTF-8.
        self.files = np.array([os.fsencode(name) for name in rows[:, 1]], dtype=bytes)
        missing = []
        files_in: dict[str, set[str]] = {}  # each folder is listed: asking for each file takes long on network drives
        for row in range(len(rows)):
            folder, name = os.path.split(self.path(row))
            if folder not in files_in:
                files_in[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
            if name not in files_in[folder]:
                missing.append(row)
        if missing:
            name = printable(self.path(missing[0]))
            count = f"{len(missing)} of {len(rows)} files are missing"
            raise DataError(f"{where(missing[0])}: {name} does not exist ({count}); set data.root, or remove the rows")
        if len(rows):
            self.open_cache()

    def path(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.files[index]))


def class_names(texts: np.ndarray) -> list[str] | None:
    """The classes, sorted. None if all texts are numbers, and some are not whole."""
    names = sorted(set(texts))
    if all(name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=int)
    try:
        np.array(names, float)
    except ValueError:
        return names
    return None


def number_of(text: str) -> float:
    """The number that the text stands for, or NaN. It is 1 for true and 0 for false."""
    try:
        return float(TRUTH.get(text.lower(), text))
    except ValueError:
        return float("nan")
