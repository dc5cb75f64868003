"""Tables of text for a terminal: a sweep's and the benches'."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table. A column is aligned right if all its cells are numbers, and left otherwise."""
    sides = [
        "right" if all(cell[:1] in "-.0123456789" for cell in column) else "left" for column in zip(*rows, strict=True)
    ]
    text = tabulate(rows, headings, tablefmt="plain", colalign=sides, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]
