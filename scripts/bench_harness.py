"""What the benches share: loaders measured in turns, medians, a table, a JSON file, and errors of one sentence."""

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

Row = dict[str, Any]  # "loader" and what was measured, as in the JSON file
Columns = Sequence[tuple[str, str, Callable[[Any], str]]]  # a key of the rows, its heading, how its value is written


class BenchError(ValueError):
    """What cannot be measured, and why, in one sentence."""


def parsed(
    parser: argparse.ArgumentParser, arguments: list[str] | None, positive: Iterable[str]
) -> argparse.Namespace:
    """The arguments, with --json added. Raises BenchError if one of those in `positive` is given and not above 0."""
    parser.add_argument("--json", type=Path, help="write the result to this file")
    given = parser.parse_args(arguments)
    for key in positive:
        value = getattr(given, key)
        if value is not None and not 0 < value < math.inf:
            raise BenchError(f"--{key.replace('_', '-')} {value:g}: give a number above 0")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        raise BenchError(f"--json {given.json}: there is no folder {given.json.parent}")
    return given


def measured_in_turns(names: Iterable[str], measure: Callable[[str], Row]) -> list[Row]:
    """For each name the medians of what `measure` returns over ROUNDS rounds.

    The names take turns in each round, so that whatever else the machine does slows all of them alike.
    """
    rounds: dict[str, list[Row]] = {name: [] for name in names}
    with tqdm(total=ROUNDS * len(rounds), unit="turn", leave=False, disable=None) as bar:
        for _ in range(ROUNDS):
            for name, measured in rounds.items():
                bar.set_description(name)
                measured.append(measure(name))
                bar.update()
    return [
        {"loader": name, **{key: statistics.median(one[key] for one in measured) for key in measured[0]}}
        for name, measured in rounds.items()
    ]


def report(title: str, columns: Columns, result: dict[str, Any], path: Path | None) -> None:
    """Prints the rows of `result` as a table, and writes all of it to `path` if there is one."""
    cells = [[heading, *(write(row[key]) for row in result["rows"])] for key, heading, write in columns]
    print("\n".join([title, "", *table(cells)]))
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def run(main: Callable[[], None]) -> None:
    """Runs a bench's main; an expected error ends it with one line and exit code 1."""
    try:
        main()
    except (BenchError, DataError, torch.OutOfMemoryError) as error:
        sys.exit(f"error: {error}")
