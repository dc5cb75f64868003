"""What the benches share: measuring in turns, medians, a table, a JSON file, and errors of one sentence."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data.errors import DataError
from training.table import table

ROUNDS = 3

Row = dict[str, Any]  # "loader" and its figures, as in the JSON file
Columns = Sequence[tuple[str, str, Callable[[Any], str]]]  # a key of the rows, its heading, the format of its value


class BenchError(ValueError):
    """One sentence that says what cannot be measured, and why."""


def parsed(
    parser: argparse.ArgumentParser, arguments: list[str] | None, positive: Iterable[str]
) -> argparse.Namespace:
    """Adds --json and parses `arguments`. Raises BenchError if one named in `positive` is not above 0."""
    parser.add_argument("--json", type=Path, help="write the result to this file")
    given = parser.parse_args(arguments)
    for key in positive:
        value = getattr(given, key)
        if value is not None and not 0 < value < math.inf:
            raise BenchError(f"--{key.replace('_', '-')} {value:g}: give a number above 0")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        raise BenchError(f"--json {given.json}: there is no folder {given.json.parent}")
    return given


def in_turns(
    names: Iterable[str], measure: Callable[[str], Row], kind: str = "loader", rounds: int = ROUNDS
) -> list[Row]:
    """Calls `measure` with each name in each round. Returns a row per name, with the name under the key `kind`.

    A row has the medians of numbers and the most frequent of other values, without those that are None. The names take
    turns, so that whatever else the machine does slows all of them alike.
    """
    measured: dict[str, list[Row]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in tqdm(measured, leave=False, disable=None):
            measured[name].append(measure(name))
    return [{kind: name, **{key: typical(rows, key) for key in rows[0]}} for name, rows in measured.items()]


def typical(rows: list[Row], key: str) -> Any:
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return None
    return statistics.mode(values) if isinstance(values[0], str) else statistics.median(values)


def report(title: str, columns: Columns, result: dict[str, Any], path: Path | None) -> None:
    """Prints the rows of `result` as a table, and writes all of `result` to `path` as JSON if a path is given."""
    cells = [[heading, *(formatted(row[key]) for row in result["rows"])] for key, heading, formatted in columns]
    print("\n".join([title, "", *table(cells)]))
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def run(main: Callable[[], None]) -> None:
    """Runs a bench's main; an expected error ends it with one line and exit code 1."""
    try:
        main()
    except (BenchError, DataError, torch.OutOfMemoryError) as error:
        sys.exit(f"error: {error}")
