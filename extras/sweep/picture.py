"""Draws the picture of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from extras.figure import INK, new_figure, png
from extras.table import shorten

COLORS, RANGE = {" ": "#9ecae1", "=": "#4a98c9", ">": "#08519c"}, "#d94801"

Numbers = tuple[float, float, float] | None  # a value, and the lowest and the highest that were measured


class Bar(NamedTuple):
    """A row of the picture."""

    label: str
    mark: str  # a key of COLORS
    speed: Numbers  # in images/s
    waiting: Numbers  # share of the time
    missing: str  # the word for a number that is None


def draw_bars(title: str, bars: Sequence[Bar], ceiling: float | None) -> bytes:
    """A PNG with two bar charts, of images/s and of the share of time spent waiting, and a row for each bar.

    ceiling: the images/s with free data, a dashed line. A thin line on a bar is its range.
    """
    figure = new_figure(title, 13, 1.5 + 0.28 * len(bars))
    panels = figure.subplots(1, 2, sharey=True)
    longest = max([ceiling or 0.0, *(bar.speed[2] for bar in bars if bar.speed)]) or 1.0
    heading = "Training speed (images/s, more is better)"
    if ceiling:
        heading += f"\ndashed: {ceiling:,.0f} if data were free"
        panels[0].axvline(ceiling, color=INK, linestyle="--", linewidth=1.2)
    contents = (
        (heading, [bar.speed for bar in bars], longest, "{:,.0f}", "{x:,.10g}"),
        ("Waiting for data (% of the time, less is better)", [bar.waiting for bar in bars], 1.0, "{:.1%}", "{x:.0%}"),
    )
    for axes, (heading, numbers, longest, text, ticks) in zip(panels, contents, strict=True):
        values, lows, highs = np.array([one or (0.0, 0.0, 0.0) for one in numbers]).T
        style = {"color": [COLORS[bar.mark] for bar in bars], "xerr": (values - lows, highs - values)}
        drawn = axes.barh(range(len(bars)), values, 0.72, ecolor=RANGE, **style)
        texts = [text.format(one[0]) if one else bar.missing for bar, one in zip(bars, numbers, strict=True)]
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.bar_label(drawn, texts, padding=5, parse_math=False, bbox=box)
        axes.set_title(heading, loc="left", fontsize=10.5)
        axes.set_xlim(0, 1.15 * longest)
        axes.xaxis.set_major_formatter(ticks)
        axes.tick_params(length=0)
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].set_yticks(range(len(bars)), [shorten(bar.label, 60) for bar in bars], parse_math=False)
    panels[0].set_ylim(len(bars) - 0.4, -0.6)  # from the top down
    return png(figure)
