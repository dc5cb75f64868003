"""Draws the picture of a sweep from labels and numbers; training/sweep.py knows what they mean."""

from __future__ import annotations

import io
from collections.abc import Sequence

from training.table import shorten

INK, BAR, BEST = "#222222", "#9ecae1", "#08519c"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def draw_sweep(
    labels: Sequence[str],
    speeds: Sequence[float | str],
    waiting: Sequence[float | str],
    best: int | None,
    ceiling: float | None,
) -> bytes:
    """A PNG with two bar charts: images/s, and the share of time spent waiting. The bars of `best` are dark.

    Where a word such as "failed" is given in place of a number, the word is written where the bar would be. `ceiling`
    (images/s) is drawn as a dashed line. Matplotlib is imported only here, and its global state is not changed.
    """
    from matplotlib.figure import Figure

    figure = Figure((13, 1.5 + 0.28 * len(labels)), dpi=130, layout="constrained")
    title = "No job measured its speed" if best is None else f"Fastest: {labels[best]}"
    figure.suptitle(shorten(title, 100), x=0.01, ha="left", fontsize=13, weight="bold", color=INK, parse_math=False)
    panels = figure.subplots(1, 2, sharey=True)
    speed_heading = "Training speed (images/s, more is better)"
    if ceiling:
        speed_heading += f"\ndashed: {ceiling:,.0f} if data were free"
        panels[0].axvline(ceiling, color=INK, linestyle="--", linewidth=1.2)
    highest = max([ceiling or 0.0, *(speed for speed in speeds if not isinstance(speed, str))]) or 1.0
    contents = (
        (speed_heading, speeds, highest, "{:,.0f}".format, "{x:,.10g}"),
        ("Waiting for data (% of the time, less is better)", waiting, 1.0, percent, "{x:.0%}"),
    )
    for axes, (heading, values, longest, write, ticks) in zip(panels, contents, strict=True):
        lengths = [0.0 if isinstance(value, str) else value for value in values]
        bars = axes.barh(range(len(labels)), lengths, height=0.72, color=BAR)
        texts = [value if isinstance(value, str) else write(value) for value in values]
        axes.bar_label(bars, texts, padding=4, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
        if best is not None:
            bars[best].set_color(BEST)
        axes.set_title(heading, loc="left", fontsize=10.5)
        axes.set_xlim(0, 1.15 * longest)
        axes.xaxis.set_major_formatter(ticks)
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].set_yticks(range(len(labels)), [shorten(label, 60) for label in labels], parse_math=False)
    panels[0].set_ylim(len(labels) - 0.4, -0.6)  # from the top down
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
