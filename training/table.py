"""Text tables for the terminal."""

from collections.abc import Iterable

from tabulate import tabulate


def table(columns: Iterable[list[str]]) -> list[str]:
    """The lines of a table. The first cell of a column is its heading. Columns of numbers are aligned right."""
    columns = [[shorten(cell, 32) for cell in column] for column in columns]
    sides = ["right" if all(cell[:1] in "-±.0123456789" for cell in column[1:]) else "left" for column in columns]
    text = tabulate(list(zip(*columns, strict=True)), tablefmt="plain", colalign=sides, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def shorten(text: str, longest: int) -> str:
    """Returns `text`; if it is longer than `longest` characters, its middle is replaced by …."""
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"
