"""read_table: some columns of a CSV, JSON or Parquet file, as texts."""

import csv
import importlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError, explained

HOW = "give a .csv in UTF-8, a .json (objects in a list, or one per line), or a .parquet (needs `pip install pyarrow`)"


def read_table(path: Path, columns: Sequence[str]) -> np.ndarray:
    """The number of each row, and its cells in these columns, as texts without spaces around them: objects (N, 1 + K).

    .json and .jsonl, .parquet, and else CSV in UTF-8, with commas, semicolons or tabs. A CSV's header is row 1. Rows
    whose cells are all empty are left out. Raises DataError for a file that cannot be read, for a column that it does
    not have or has twice, and for an empty cell.
    """
    table = list[list[Any]]()
    with explained(f"{path} cannot be read", HOW):
        for number, record in records(path, columns):
            if not table:
                check_columns(path, columns, record)
            cells = [text_of(f"{path}, row {number}", column, record.get(column)) for column in columns]
            if any(cells) and "" in cells:
                empty = columns[cells.index("")]
                raise DataError(f"{path}, row {number}: {empty!r} is empty; fill it, or remove the row")
            if any(cells):
                table.append([number, *cells])
        if not table:
            raise ValueError("it has no rows")
    return np.array(table, dtype=object)


def check_columns(path: Path, columns: Sequence[str], names: Collection[str]) -> None:
    if unknown := [column for column in columns if column not in names]:
        raise DataError(
            f"{path} has no column {unknown[0]!r}, only {', '.join(map(repr, names))}: set data.image, data.label and "
            "others to names of columns"
        )


def text_of(row: str, column: str, value: Any) -> str:
    """A cell as text. None and NaN are empty."""
    if isinstance(value, list | dict | bytes):
        kind = type(value).__name__
        remedy = "write a text or a number; images that a Parquet file contains are for data=huggingface"
        if isinstance(value, list):
            remedy = "write a text or a number; for several classes a column of 0 and 1 for each, for task=multilabel"
        raise DataError(f"{row}: {column!r} has a {kind}, {str(value)[:60]}: {remedy}")
    return "" if value is None or value != value else str(value).strip()


def records(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows by the names of their columns, with their numbers."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        table = importlib.import_module("pyarrow.parquet").ParquetDataset(path)
        check_columns(path, columns, table.schema.names)
        yield from enumerate(table.read(list(columns)).to_pylist(), 1)
        return
    with path.open(encoding="utf-8-sig", newline="") as file:
        if suffix in (".json", ".jsonl"):
            text = file.read().strip()
            is_list = text.startswith("[")
            yield from enumerate(
                json.loads(text) if is_list else [json.loads(line or "{}") for line in text.split("\n")], 1
            )
            return
        separator = max(",;\t", key=file.readline().count)
        file.seek(0)
        reader = csv.DictReader(file, delimiter=separator, skipinitialspace=True, strict=True)
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        counts = Counter(names)
        if twice := [column for column in columns if counts[column] > 1]:
            raise DataError(f"{path} has the column {twice[0]!r} twice: rename one in its header")
        for number, record in enumerate(reader, 2):
            if None in record:
                raise DataError(
                    f"{path}, row {number} has more cells than the header: put double quotes around a text that has a "
                    f"{separator!r}; row 1 has to be the header"
                )
            yield number, record
