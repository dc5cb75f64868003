"""Predictions: the rows of a table that grows batch by batch, and goes on where it ends after an interruption.

PATH.csv has a row for each sample that could be read, in order, and PATH_failed.csv the others. A sample is in one of
them or in none: who starts again reads both and leaves out what is there. A row that was not written whole is cut off.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from training.config import ConfigError
from training.files import write_whole

FAILED = ("file", "reason")


class Predictions:
    """The two tables, open to be appended to; `done` has the names of their samples.

    header: the columns of the first; the sample's name is the first column of both. about: which network the
    predictions are of, as JSON: it is written beside them. Raises ConfigError if those in `path` are of another.
    """

    def __init__(self, path: Path, header: Sequence[str], about: dict[str, Any]) -> None:
        failed = path.with_name(f"{path.stem}_failed.csv")
        about_path = path.with_name(f"{path.stem}_about.json")
        text = json.dumps(about, indent=2) + "\n"
        there = [str(file) for file in (path, failed, about_path) if file.exists()]
        if there and (not about_path.exists() or about_path.read_text() != text):
            raise ConfigError(
                f"{', '.join(there)} are there, and not predictions of this checkpoint for these data: choose another "
                "--out, or delete them"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(about_path, text)
        self.done: set[str] = set()
        self._tables = []
        for table, columns in ((path, header), (failed, FAILED)):
            self.done |= read_whole_rows(table, columns)
            self._tables.append(table.open("a", newline="", encoding="utf-8", errors="surrogateescape"))

    def append(self, rows: Iterable[Sequence[object]], failed: Iterable[Sequence[object]]) -> None:
        """Writes rows to both tables. They are in the files when this returns."""
        for file, new in zip(self._tables, (rows, failed), strict=True):
            text = io.StringIO()
            # Strings are quoted, because csv writes a carriage return in a name as it is, and then cannot read it.
            csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n").writerows(new)
            file.write(text.getvalue())
            file.flush()

    def __enter__(self) -> Predictions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for file in self._tables:
            file.close()


def read_whole_rows(path: Path, header: Sequence[str]) -> set[str]:
    """The first cells of the rows. What follows the last whole row is cut off; an empty file gets the header."""
    names: list[str] = []
    path.touch()
    with path.open("rb+") as file:
        end = read = 0
        line = b""

        def lines() -> Iterator[str]:
            nonlocal line, read
            for line in file:
                read += len(line)
                yield line.decode("utf-8", "surrogateescape")

        for row in csv.reader(lines()):  # a quoted name may have several lines
            if not line.endswith(b"\n") or len(row) != len(header):
                break
            names.append(row[0])
            end = read
        file.truncate(end)
        if not names:
            file.seek(0)
            file.write(",".join(header).encode() + b"\n")
    return set(names[1:])
