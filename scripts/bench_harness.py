"""What the benchmarks share: measuring in turns, medians, a table and a JSON file."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from data.errors import check_choice
from training import script

ROUNDS = 3

Row = dict[str, Any]  # "loader", and the figures by name, as in the JSON file
Columns = Sequence[tuple[str, str, str]]  # a key of the rows, its heading, the format of its values; None becomes "-"


def parser(about: str | None) -> argparse.ArgumentParser:
    command_line = script.parser(about)
    command_line.add_argument("--json", type=Path, help="write the result to this file")
    return command_line


def chosen(option: str, text: str | None, choices: Collection[str]) -> list[str]:
    """The names in `text`, separated by commas; None: all choices. Raises DataError for an unknown name."""
    names = text.split(",") if text else list(choices)
    for name in names:
        check_choice(option, name, choices)
    return names


def in_turns(names: Iterable[str], measure: Callable[[str], dict[str, float]], rounds: int = ROUNDS) -> list[Row]:
    """Calls `measure` with each name in each round. Returns a row per name with the medians.

    The names take turns, so that other programs slow all of them alike. `spread` is half of the first figure's range,
    as a share of its median.
    """
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in tqdm(measured, leave=False, disable=None):
            measured[name].append(measure(name))
    rows: list[Row] = []
    for name, turns in measured.items():
        medians = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        first_key = next(iter(medians))
        values = [turn[first_key] for turn in turns]
        half_range = (max(values) - min(values)) / 2
        rows.append({"loader": name, **medians, "spread": half_range / medians[first_key]})
    return rows


def report(title: str, columns: Columns, result: dict[str, Any], path: Path | None, notes: str = "") -> str:
    """Prints and returns the title, the rows of `result` as a Markdown table, and the notes.

    Writes all of `result` to `path` as JSON if a path is given.
    """
    headings = [heading for _, heading, _ in columns]
    cells = []
    for row in result["rows"]:
        cells.append(["-" if row[key] is None else form.format(row[key]) for key, _, form in columns])
    table = tabulate(cells, headings, tablefmt="github", disable_numparse=True)
    text = f"{title}\n\n{table}\n"
    if notes:
        text += f"\n{notes}\n"
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
    return text
