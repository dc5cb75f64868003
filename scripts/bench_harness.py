"""What the benches share: measuring in turns, medians, a table and a JSON file."""

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
from scripts import command
from training.config import ConfigError

ROUNDS = 3

Row = dict[str, Any]  # "loader" and its figures, as in the JSON file
Columns = Sequence[tuple[str, str, str]]  # a key of the rows, its heading, the format of its value; None is "-"


def parser(about: str | None) -> argparse.ArgumentParser:
    made = command.parser(about)
    made.add_argument("--json", type=Path, help="write the result to this file")
    return made


def chosen(option: str, given: str | None, known: Collection[str]) -> list[str]:
    """The names that the text `given` lists, separated by commas; None: all. Raises ConfigError for an unknown one."""
    names = given.split(",") if given else list(known)
    for name in names:
        check_choice(option, name, known, ConfigError)
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
    found: list[Row] = []
    for name, turns in measured.items():
        medians = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        first, median = next(iter(medians.items()))
        values = [turn[first] for turn in turns]
        found.append({"loader": name, **medians, "spread": (max(values) - min(values)) / 2 / median})
    return found


def report(title: str, columns: Columns, result: dict[str, Any], path: Path | None, notes: str = "") -> str:
    """Prints and returns the title, the rows of `result` as a Markdown table, and the notes.

    Writes all of `result` to `path` as JSON if a path is given.
    """
    cells = [
        ["-" if row[key] is None else form.format(row[key]) for key, _, form in columns] for row in result["rows"]
    ]
    headings = [heading for _, heading, _ in columns]
    text = f"{title}\n\n{tabulate(cells, headings, tablefmt='github', disable_numparse=True)}\n"
    text += f"\n{notes}\n" if notes else ""
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
    return text
