"""Draws the picture of a sweep from labels and numbers, which training/sweeps/sweep.py collects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from training.figure import INK, new_figure, png
from training.table import shorten

COLORS, SPREAD = {"": "#9ecae1", "equal": "#4a98c9", "best": "#08519c"}, "#d94801"


class Figure(NamedTuple):
    """A number in the report, and the ends of its spread."""

    value: float
    low: float
    high: float

    def overlaps(self, other: Figure) -> bool:
        """Whether neither counts as better.

        Two settings of the same speed seem different by chance in 10 % of the cases with three repeats of each (2 of
        the 20 orders of six numbers), and in 3 % with four.
        """
        return self.low <= other.high and other.low <= self.high

    def half_spread(self, text: str) -> str:
        """Half the width of the spread in the format `text`; "" if it is not known."""
        return text.format((self.high - self.low) / 2) if self.low < self.high else ""


Cell = Figure | str  # a word such as "failed" stands for a missing number


def draw_bars(
    title: str,
    labels: Sequence[str],
    speeds: Sequence[Cell],
    waiting: Sequence[Cell],
    marks: Sequence[str],
    ceiling: float | None,
) -> bytes:
    """A PNG with two bar charts, of images/s and of the share of time spent waiting, and a row for each label.

    marks: a key of COLORS for each row. ceiling: the images/s with free data, a dashed line. A thin line on a bar is
    its spread. A word stands in place of a bar.
    """
    figure = new_figure(title, 13, 1.5 + 0.28 * len(labels))
    panels = figure.subplots(1, 2, sharey=True)
    highest = max([ceiling or 0.0, *(cell.high for cell in speeds if isinstance(cell, Figure))]) or 1.0
    heading = "Training speed (images/s, more is better)"
    if ceiling:
        heading += f"\ndashed: {ceiling:,.0f} if data were free"
        panels[0].axvline(ceiling, color=INK, linestyle="--", linewidth=1.2)
    contents = (
        (heading, speeds, highest, "{:,.0f}", "{x:,.10g}"),
        ("Waiting for data (% of the time, less is better)", waiting, 1.0, "{:.1%}", "{x:.0%}"),
    )
    for axes, (heading, cells, longest, text, ticks) in zip(panels, contents, strict=True):
        for row, cell in enumerate(cells):
            value, low, high = cell if isinstance(cell, Figure) else (0.0, 0.0, 0.0)
            axes.barh(row, value, height=0.72, color=COLORS[marks[row]])
            if low < high:
                axes.plot([low, high], [row, row], color=SPREAD, linewidth=1.5, marker="|", markersize=6)
            style = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "parse_math": False}
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.annotate(text.format(value) if isinstance(cell, Figure) else cell, (high, row), bbox=box, **style)
        axes.set_title(heading, loc="left", fontsize=10.5)
        axes.set_xlim(0, 1.15 * longest)
        axes.xaxis.set_major_formatter(ticks)
        axes.tick_params(length=0)
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].set_yticks(range(len(labels)), [shorten(label, 60) for label in labels], parse_math=False)
    panels[0].set_ylim(len(labels) - 0.4, -0.6)  # from the top down
    return png(figure)
