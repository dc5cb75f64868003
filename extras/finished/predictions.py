"""Predictions: a table on disk that grows batch by batch, and can be continued after an interruption.

PATH.csv has a row for each sample that could be read, in order; PATH_failed.csv has the others. No sample is in both.
A continued run reads both and skips the samples that are there. An incomplete last row is removed.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from training.config import ConfigError
from training.files import write_whole

FAILED = ("file", "reason")


class Predictions:
    """The two tables, to append to; `done` has the names of the samples in them.

    path: PATH.csv. header: its columns; the first one is the sample's name, as in PATH_failed.csv. about: the network
    and the data of the predictions, for PATH_about.json. Raises ConfigError if the files there have another `about`.
    """

    def __init__(self, path: Path, header: Sequence[str], about: dict[str, Any]) -> None:
        failed = path.with_name(f"{path.stem}_failed.csv")
        about_path = path.with_name(f"{path.stem}_about.json")
        text = json.dumps(about, indent=2) + "\n"
        existing = [str(file) for file in (path, failed, about_path) if file.exists()]
        if existing and (not about_path.exists() or about_path.read_text() != text):
            raise ConfigError(
                f"{', '.join(existing)} exist, and are not predictions of this checkpoint for these data: choose "
                "another --out, or delete them"
            )
        tables = {path: whole_rows(path, header), failed: whole_rows(failed, FAILED)}
        self.done = {name for rows in tables.values() for name in names_in(rows)}
        self.path, self._tables = path, (path, failed)
        self._begin: dict[Path, bytes] = {about_path: text.encode(), **tables}  # the files before the first new row

    def append(self, rows: Iterable[Sequence[object]], failed: Iterable[Sequence[object]]) -> None:
        """Appends rows to both tables; the first call makes the files. The rows are in them when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path, content in self._begin.items():
            write_whole(path, content)
        self._begin = {}
        for path, new in zip(self._tables, (rows, failed), strict=True):
            with path.open("a", newline="", encoding="utf-8", errors="surrogateescape") as file:
                csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n").writerows(new)


def whole_rows(path: Path, header: Sequence[str]) -> bytes:
    """The content of the table without an incomplete last row; only the header if there is no file."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1] or (",".join(header) + "\n").encode()


def names_in(table: bytes) -> set[str]:
    """The first cells of the table's rows."""
    text = io.StringIO(table.decode("utf-8", "surrogateescape"), newline="")
    return {row[0] for row in list(csv.reader(text))[1:]}
