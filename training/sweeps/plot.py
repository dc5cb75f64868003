"""Draws the picture of a sweep from labels and numbers, which training/sweeps/sweep.py collects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.figure import INK, new_figure, png
from training.table import shorten

BAR, EQUAL, BEST = "#9ecae1", "#4a98c9", "#08519c"
HIGHLIGHT = "#d94801"  # frames in the heat map, lines of the spread in the bar chart
SPEED_HEADING = "Training speed (images/s, more is better)"
WAITING_HEADING = "Waiting for data (% of the time, less is better)"
WRITE_SPEED = "{:,.0f}".format
Cell = tuple[float, float, float] | str  # a value and the ends of its spread; or a word such as "failed"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def spread(cell: Cell) -> str:
    """Half the width of the spread in percent of the value, such as "±3.1 %"; "" if it is not known."""
    if isinstance(cell, str) or not cell[0] or cell[1] == cell[2]:
        return ""
    return f"±{percent((cell[2] - cell[1]) / 2 / cell[0])}"


def draw_bars(
    title: str,
    labels: Sequence[str],
    speeds: Sequence[Cell],
    waiting: Sequence[Cell],
    best: int | None,
    equals: Sequence[int],
    ceiling: float | None,
) -> bytes:
    """A PNG with two bar charts, of images/s and of the share of time spent waiting, and a row for each label.

    best, equals: the rows of the best setting, which is drawn darkest, and of all that equal it. ceiling: the images/s
    with free data, a dashed line. A thin line on a bar is its spread. A word stands in place of a bar.
    """
    free = f"\ndashed: {ceiling:,.0f} if data were free" if ceiling else ""
    figure, panels = new_panels(title, 13, 1.5 + 0.28 * len(labels), free)
    if ceiling:
        panels[0].axvline(ceiling, color=INK, linestyle="--", linewidth=1.2)
    highest = max([ceiling or 0.0, *(cell[2] for cell in speeds if not isinstance(cell, str))]) or 1.0
    contents = ((speeds, highest, WRITE_SPEED, "{x:,.10g}"), (waiting, 1.0, percent, "{x:.0%}"))
    for axes, (cells, longest, write, ticks) in zip(panels, contents, strict=True):
        values, low, high = zip(*((0.0, 0.0, 0.0) if isinstance(cell, str) else cell for cell in cells), strict=True)
        bars = axes.barh(range(len(labels)), values, height=0.72, color=BAR)
        for row, (start, end) in enumerate(zip(low, high, strict=True)):
            if start < end:
                axes.plot([start, end], [row, row], color=HIGHLIGHT, linewidth=1.5, marker="|", markersize=6)
        for row, (cell, end) in enumerate(zip(cells, high, strict=True)):
            text = cell if isinstance(cell, str) else write(cell[0])
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(text, (end, row), bbox=box, parse_math=False, **place)
        for row in equals:
            bars[row].set_color(BEST if row == best else EQUAL)
        axes.set_xlim(0, 1.15 * longest)
        axes.xaxis.set_major_formatter(ticks)
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].set_yticks(range(len(labels)), [shorten(label, 60) for label in labels], parse_math=False)
    panels[0].set_ylim(len(labels) - 0.4, -0.6)  # from the top down
    return png(figure)


def draw_heat_map(
    title: str,
    axes: Sequence[tuple[str, list[str]]],
    places: Sequence[tuple[int, int]],
    speeds: Sequence[Cell],
    waiting: Sequence[Cell],
    best: int | None,
    equals: Sequence[int],
    ceiling: float | None,
) -> bytes:
    """A PNG with two heat maps, of images/s and of the share of time spent waiting, with numbers in the cells.

    axes: the name and values of the key down the side, and of the key along the bottom. places: row and column of each
    cell in `speeds` and `waiting`. best, equals: numbers in these lists of the best setting, which gets a thick frame,
    and of all that equal it, which get a thin one. ceiling: images/s with free data, for the heading.
    """
    from matplotlib.patches import Rectangle

    (down, rows), (along, columns) = axes
    free = f"\nif data were free: {ceiling:,.0f}" if ceiling else ""
    figure, panels = new_panels(title, max(10.0, 3.0 + 2.0 * len(columns)), 2.2 + 0.55 * len(rows), free)
    for panel, cells, write in zip(panels, (speeds, waiting), (WRITE_SPEED, percent), strict=True):
        grid = [[float("nan")] * len(columns) for _ in rows]
        for (row, column), cell in zip(places, cells, strict=True):
            grid[row][column] = float("nan") if isinstance(cell, str) else cell[0]
        panel.set_facecolor("#f0f0f0")  # of cells without a number
        top = 1.0 if cells is waiting else None
        image = panel.imshow(grid, cmap="Blues", aspect="auto", vmin=0.0, vmax=top)
        for (row, column), cell in zip(places, cells, strict=True):
            text, dark = (cell, False) if isinstance(cell, str) else (write(cell[0]), image.norm(cell[0]) > 0.55)
            if cells is speeds and spread(cell):
                text += f"\n{spread(cell)}"
            color = "white" if dark else INK
            panel.text(column, row, text, ha="center", va="center", color=color, fontsize=9, parse_math=False)
        for equal in equals:
            (row, column), width = places[equal], 3.5 if equal == best else 1.2
            corner = column - 0.47, row - 0.46
            panel.add_patch(Rectangle(corner, 0.94, 0.92, fill=False, edgecolor=HIGHLIGHT, linewidth=width))
        panel.set_xticks(range(len(columns)), [shorten(value, 20) for value in columns], parse_math=False)
        panel.set_yticks(range(len(rows)), [shorten(value, 30) for value in rows], parse_math=False)
        panel.set_xlabel(along, parse_math=False)
        panel.spines[:].set_visible(False)
    figure.axes[0].set_ylabel(down, parse_math=False)
    return png(figure)


def new_panels(title: str, width: float, height: float, free: str) -> tuple[Any, Any]:
    """A figure and its two panels, for images/s and for waiting; free: text for the heading of the first."""
    figure = new_figure(title, width, height)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, heading in zip(panels, (SPEED_HEADING + free, WAITING_HEADING), strict=True):
        panel.set_title(heading, loc="left", fontsize=10.5)
        panel.tick_params(length=0)
    return figure, panels
