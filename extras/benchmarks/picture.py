"""The benchmarks' pictures: a bar of images per second for each row."""

from collections.abc import Sequence
from typing import Any

from training.figure import INK, new_figure, png

OURS = "#08519c"
THEIRS = "#9ecae1"


def draw_bars(title: str, names: Sequence[str], speeds: Sequence[float], note: str = "", **style: Any) -> bytes:
    """A PNG. note: is added to the label of the axis. style: arguments of matplotlib's barh."""
    figure = new_figure(title, 11, 1 + 0.34 * len(names))
    axes = figure.subplots()
    bars = axes.barh(names, speeds, **style)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, color=INK)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()  # the first row on top
    axes.set(xlim=(0, 1.25 * max(speeds)), xlabel=f"images per second (more is better){note}")
    return png(figure)
