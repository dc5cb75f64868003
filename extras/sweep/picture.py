"""Draws the picture of a sweep."""

from typing import Any, NamedTuple

import numpy as np

from training.look import INK, new_figure, png, shorten

COLORS = {" ": "#9ecae1", "=": "#4a98c9", ">": "#08519c"}
RANGE = "#d94801"  # colour of the line from the lowest to the highest speed


class Bar(NamedTuple):
    """A row of the picture."""

    label: str
    mark: str  # a key of COLORS
    measured: tuple[float, float, float] | None  # images/s or a score: the value, and the ends of its range
    text: str  # beside the bar


def draw_bars(title: str, bars: list[Bar], ceiling: float | None) -> bytes:
    """A PNG with a bar of images/s for each setting. A thin line on a bar is its range.

    ceiling: the images/s with free data, a dashed line.
    """
    figure = new_figure(title, 11, 1.5 + 0.28 * len(bars))
    axes = figure.subplots()
    heading = "Speed in images/s, with its range (more is better), and the share of the time spent waiting for data"
    if ceiling:
        heading += f"\ndashed: {ceiling:,.0f} if data were free"
        axes.axvline(ceiling, color=INK, linestyle="--", linewidth=1.2)
    values, lows, highs = np.array([bar.measured or (0.0, 0.0, 0.0) for bar in bars]).T
    colors = [COLORS[bar.mark] for bar in bars]
    ranges = (values - lows, highs - values)
    drawn = axes.barh(range(len(bars)), values, 0.72, color=colors, xerr=ranges, ecolor=RANGE)
    axes.bar_label(drawn, [bar.text for bar in bars], padding=5, parse_math=False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(heading, loc="left", fontsize=10.5)
    axes.set_xlim(0, 1.3 * max(ceiling or 0.0, *highs, 1.0))
    label_rows(axes, bars)
    return png(figure)


def draw_scores(title: str, heading: str, bars: list[Bar]) -> bytes:
    """A PNG with a point for each setting, on an axis that need not begin at 0, and its range as a line."""
    figure = new_figure(title, 11, 1.5 + 0.28 * len(bars))
    axes = figure.subplots()
    axes.margins(x=0.08)
    for row, bar in enumerate(bars):
        value, low, high = bar.measured or (np.nan, np.nan, np.nan)
        axes.plot((low, high), (row, row), color=RANGE, linewidth=1.5)
        axes.plot(value, row, "o", markersize=8, color=COLORS[bar.mark])
        axes.text(1.01, row, bar.text, transform=axes.get_yaxis_transform(), va="center", parse_math=False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(heading, loc="left", fontsize=10.5, parse_math=False)
    label_rows(axes, bars)
    return png(figure)


def label_rows(axes: Any, bars: list[Bar]) -> None:
    axes.set_yticks(range(len(bars)), [shorten(bar.label, 60) for bar in bars], parse_math=False)
    axes.set_ylim(len(bars) - 0.4, -0.6)  # from the top down
