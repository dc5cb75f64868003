"""The benchmarks' pictures: a bar of images per second for each row, with the spread of its rounds."""

from scripts.bench_harness import Row
from training.look import INK, new_figure, png

OURS = "#08519c"
THEIRS = "#9ecae1"
SPREAD = "#d94801"


def draw_bars(title: str, rows: dict[str, Row], ours: str | tuple[str, ...]) -> bytes:
    """A PNG with the rows of bench_harness.in_turns by their names; those whose names begin with `ours` stand out."""
    speeds = [row["images_per_second"] for row in rows.values()]
    spreads = [row["spread"] * row["images_per_second"] for row in rows.values()]
    figure = new_figure(title, 11, 1 + 0.34 * len(rows))
    axes = figure.subplots()
    colors = [OURS if name.startswith(ours) else THEIRS for name in rows]
    bars = axes.barh([*rows], speeds, color=colors, xerr=spreads, ecolor=SPREAD)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, color=INK)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()  # the first row on top
    axes.set(xlim=(0, 1.25 * max(speeds)), xlabel="images per second (more is better), and the spread of the rounds")
    return png(figure)
