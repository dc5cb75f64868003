"""What the benches share: measuring in turns, medians, a table, a JSON file, and errors of one sentence."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from data.errors import DataError, check_choice
from training.table import table

ROUNDS = 3

Row = dict[str, Any]  # "loader" and its figures, as in the JSON file
Columns = Sequence[tuple[str, str, Callable[[Any], str]]]  # a key of the rows, its heading, the format of its value


class BenchError(ValueError):
    """One sentence that says what cannot be measured, and why."""


def parsed(
    parser: argparse.ArgumentParser, arguments: list[str] | None, positive: Iterable[str] = ()
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


def chosen(option: str, given: str | None, known: Collection[str]) -> list[str]:
    """The names that the text `given` lists, separated by commas; None: all. Raises BenchError for an unknown one."""
    names = given.split(",") if given else list(known)
    for name in names:
        check_choice(option, name, known, BenchError)
    return names


def in_turns(names: Iterable[str], measure: Callable[[str], dict[str, float]], rounds: int = ROUNDS) -> list[Row]:
    """Calls `measure` with each name in each round. Returns a row per name with the medians.

    The names take turns, so that whatever else the machine does slows all of them alike. `spread` is half of the first
    figure's range, as a share of its median.
    """
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in tqdm(measured, leave=False, disable=None):
            measured[name].append(measure(name))
    table: list[Row] = []
    for name, rows in measured.items():
        first, medians = next(iter(rows[0])), {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        ends = [choose(row[first] for row in rows) for choose in (max, min)]
        table.append({"loader": name, **medians, "spread": (ends[0] - ends[1]) / 2 / medians[first]})
    return table


def cells(columns: Columns, rows: list[Row]) -> list[list[str]]:
    """The columns of a table, each with its heading first."""
    return [[heading, *(formatted(row[key]) for row in rows)] for key, heading, formatted in columns]


def markdown(columns: Columns, rows: list[Row]) -> str:
    lines = list(zip(*cells(columns, rows), strict=True))
    return tabulate(lines, headers="firstrow", tablefmt="github", disable_numparse=True)


def report(title: str, columns: Columns, result: dict[str, Any], path: Path | None) -> None:
    """Prints the rows of `result` as a table, and writes all of `result` to `path` as JSON if a path is given."""
    print("\n".join([title, "", *table(cells(columns, result["rows"]))]))
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def run(main: Callable[[], None]) -> None:
    """Runs a bench's main; an expected error ends it with one line and exit code 1."""
    try:
        main()
    except (BenchError, DataError, torch.OutOfMemoryError) as error:
        sys.exit(f"error: {error}")
