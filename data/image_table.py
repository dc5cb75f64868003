"""ImageTable: image files that a table names, with their labels."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, check_choice, explained, home_path, printable
from data.guarded import guarded
from data.image_folder import ImageFiles, one_name, real_paths
from data.images.crops import class_indices
from data.subset import ends_of
from data.table import read_table

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
MISSING = ("nan", "na", "n/a", "none", "null")  # what programs write for a missing label; people, for a class
TRUTH = {"true": "1", "false": "0"}
# Not all that Python takes as a number: 1_1 is a name.
is_number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+|nan|inf)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE).fullmatch
is_whole = re.compile(r"(-?\d{1,300})(\.0*)?", re.ASCII).fullmatch


class ImageTable(ImageFiles):
    """The images that a table names (data/table.py) in the column `image`: paths in `root`, or in the table's folder.

    label: a column of texts or whole numbers, which are classes (1.0 is 1, and NA is a name); of other numbers, for
    task=regression (with `numbers` also whole ones); or a list of columns: of 0 and 1, classes for task=multilabel, or
    of numbers.
    split: a column with train, val or test. If no row has test, the rows with val are the test set; else they are the
    validation set. test_table: the file of the test set. Without both the test set is empty: see data.val_fraction.
    group: a column, such as a patient: rows with the same value are never separated.
    Classes are those of the training rows. For samples and the arguments in `crops` see CroppedDataset. Raises
    DataError, with the number of the row, for a table that cannot be used, and for files that do not exist.
    """

    is_val: np.ndarray | None = None  # bool (N,), see data.subset.split
    val_groups: np.ndarray | None = None  # (N,), the same

    @guarded
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
        labels = [label] if isinstance(label, str | int) else label
        columns = [image, *labels]
        rows = Rows(table, [*columns, *(name for name in (split, group) if name is not None)])
        parts = np.full(len(rows.numbers), "train") if split is None else rows.parts(split)
        is_train = parts == "train"
        training = rows.columns(labels)[is_train]
        tables = f"{rows.path}, {test_table}" if test_table else str(rows.path)
        groups = [] if group is None else rows.shared(is_train, lambda rows: rows.groups(group), group, test_table)
        if groups:
            raise DataError(
                f"{tables}: only some rows with {group}={groups[0]} are training rows; put all into one part"
            )
        if train and (images := rows.shared(is_train, lambda rows: rows.files(image, root), image, test_table)):
            log.warning(
                "%s: images of training rows are also in rows that validate or test, %d of them, such as %s: the "
                "scores are better than those of new images; remove their rows from one part",
                tables,
                len(images),
                images[0],
            )

        is_test = parts == ("test" if test_table or "test" in parts else "val")
        if train:
            rows.keep(~is_test)
            is_val = parts[~is_test] == "val"
            if is_val.any():
                self.is_val = is_val
            if group is not None:
                self.val_groups = rows.cells[group].astype(str)
        elif test_table:
            rows = Rows(test_table, columns)
        else:
            rows.keep(is_test)

        self._set_labels(rows, labels, training, is_list, numbers)
        self.folder = rows.folder(root)
        # Bytes in an array, because forked workers share it, and file names need not be UTF-8.
        with explained(f"{rows.path}: {image!r} has a name that no file can have", "correct it", UnicodeError):
            self.files = np.array([os.fsencode(name) for name in rows.cells[image]], dtype=bytes)
        rows.check_files([self.path(row) for row in range(len(self.files))])
        self.open_cache()

    def _set_labels(
        self, rows: "Rows", columns: Sequence[Any], training: np.ndarray, is_list: bool, numbers: bool
    ) -> None:
        """Sets `labels`, `classes` and `fits_task`. training: the labels of the training rows, as texts (N, K)."""
        classes: Sequence[str] | None = None
        if not numbers and not is_list:
            classes = class_names(training[:, 0])
        if classes is not None:
            with_comma = [name for name in classes if "," in name]
            if with_comma and all(is_number(name.replace(",", ".")) for name in classes):
                raise DataError(
                    f"{rows.path}: {columns[0]!r} has numbers with a decimal comma, such as {with_comma[0]}: write "
                    "them with a point, or with a letter if they are names of classes"
                )
            if missing := [name for name in classes if name.lower() in MISSING]:
                log.warning(
                    "%s: %s of %r is a class as any other: if it says that a label is missing, remove these rows",
                    rows.path,
                    ", ".join(missing),
                    columns[0],
                )
            self.fits_task = "classification"
            texts = without_zeros(rows.cells[columns[0]]) if all(map(is_whole, classes)) else rows.cells[columns[0]]
            self.labels = class_indices(
                np.array(texts, dtype=str), classes, rows.where, "correct it, or add a training row with this label"
            )
        else:
            values = rows.values(columns)
            self.fits_task = "regression"
            self.labels = values if is_list else values[:, 0]
            if is_list and {number_of(text) for text in training.flat} <= {0, 1}:
                self.fits_task = "multilabel"
                classes = columns
        self.classes = tuple(map(str, classes or ()))

    def sample_ids(self) -> np.ndarray:
        """The end of each image's name in the table, texts (N,): the same wherever the folder is. See `one_name`."""
        folder = os.fsencode(f"{self.folder}/")
        names = [os.fsdecode(name.removeprefix(folder)) for name in self.files.tolist()]
        return np.array(ends_of(one_name([self.path(row) for row in range(len(names))], names)), object)

    def path(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.files[index]))


class Rows:
    """Rows of a table: their `numbers` in it, and the texts (N,) of its columns by `names`."""

    def __init__(self, table: str | Path, names: Sequence[Any]) -> None:
        self.path = home_path(table)
        self.numbers, *texts = read_table(self.path, list(map(str, names))).T
        self.cells = dict(zip(names, texts, strict=True))

    def keep(self, is_kept: np.ndarray) -> None:
        self.numbers = self.numbers[is_kept]
        self.cells = {name: texts[is_kept] for name, texts in self.cells.items()}

    def where(self, row: int) -> str:
        return f"{self.path}, row {self.numbers[row]}"

    def columns(self, names: Sequence[Any]) -> np.ndarray:
        """The texts in these columns (N, K)."""
        return np.stack([self.cells[name] for name in names], 1)

    def parts(self, split: str) -> np.ndarray:
        parts = self.cells[split]
        for row, part in enumerate(parts):
            check_choice(f"{self.where(row)}: {split}", part, SPLITS)
        if "train" not in parts:
            raise DataError(f"{self.path} has no row with {split}=train: there is nothing to train on")
        return parts

    def folder(self, root: str | Path | None) -> Path:
        return home_path(root) if root else self.path.parent

    def files(self, image: str, root: str | Path | None) -> np.ndarray:
        """The real paths of the images (N,), which are equal where two tables name the same file."""
        folder = self.folder(root)
        return np.array(real_paths([os.path.join(folder, name) for name in self.cells[image]]), object)

    def shared(
        self,
        is_train: np.ndarray,
        values_of: Callable[["Rows"], np.ndarray],
        column: str,
        test_table: str | Path | None,
    ) -> list[str]:
        """The values (N,) of a column that training rows share with other rows or with those of a test table, sorted.

        values_of: returns them for this table or for the test table, which need not have the column.
        """
        if is_train.all() and not test_table:
            return []
        values = values_of(self)
        others = {*values[~is_train]}
        if test_table:
            with suppress(DataError):
                others |= {*values_of(Rows(test_table, [column]))}
        return sorted({*values[is_train]} & others)

    def groups(self, column: str) -> np.ndarray:
        return np.array(without_zeros(self.cells[column].astype(str)))

    def values(self, names: Sequence[Any]) -> np.ndarray:
        """The numbers in these columns, float32 (N, K)."""
        texts = self.columns(names)
        values = np.array([number_of(text) for text in texts.flat], np.float32).reshape(texts.shape)
        for row, column in np.argwhere(~np.isfinite(values)):
            raise DataError(
                f"{self.where(row)}: {names[column]!r} is {texts[row, column]}, not a finite number; correct it"
            )
        return values

    def check_files(self, paths: Sequence[str]) -> None:
        """Lists each folder, because asking for each file takes long on network drives."""
        folders = {os.path.dirname(path) for path in paths}
        files = {(folder, name) for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)}
        missing = [row for row, path in enumerate(paths) if os.path.split(path) not in files]
        if missing:
            row = missing[0]
            is_of_windows = os.path.exists(paths[row].replace("\\", "/"))
            remedy = (
                "write / in place of \\ in the table"
                if is_of_windows
                else "set data.root, correct the table, or remove the rows"
            )
            raise DataError(
                f"{self.where(row)}: {printable(paths[row])} does not exist ({len(missing)} of {len(paths)} files are "
                f"missing); {remedy}"
            )


def class_names(texts: np.ndarray) -> list[str] | None:
    """The classes, sorted. None if all texts are numbers, and some are not whole."""
    names = sorted(set(texts))
    if all(map(is_whole, names)):
        return sorted(set(without_zeros(names)), key=lambda name: (int(name), name))
    return None if all(map(is_number, names)) else names


def without_zeros(texts: Iterable[str]) -> list[str]:
    """Whole numbers without .0, which pandas writes for a column with gaps; other texts as they are."""
    return [whole[1] if (whole := is_whole(text)) else text for text in texts]


def number_of(text: str) -> float:
    """The number that the text stands for, or NaN. It is 1 for true and 0 for false."""
    text = TRUTH.get(text.lower(), text)
    return float(text) if is_number(text) else float("nan")
