"""The picture of a sweep: images/s beside the share of time spent waiting for data, a bar for each setting.

One or two swept keys make upright bars, the second key being the colour. More keys, many values or long names
make level bars, one a setting. This file knows settings and numbers; training/sweep.py knows what they mean.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAILED = "#222222", "#b2182b"
# Okabe and Ito, "Color Universal Design" (2008): told apart by every kind of colour vision.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
WIDEST = 7.8  # inches; a panel whose upright bars need more gets level ones


@dataclass
class Bars:
    """Where the bar of each setting stands and how it looks. Level bars grow to the right, others upwards."""

    level: bool
    positions: list[float]
    thickness: float  # in units of `positions`
    colours: list[str]
    ticks: dict[float, str]
    size: tuple[float, float]  # of one panel, in inches
    axis: str = ""
    legend_title: str = ""
    legend: dict[str, str] = field(default_factory=dict)  # label -> colour


def as_number(text: str) -> float | None:
    """The number that `text` spells, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def shorten(text: str, longest: int) -> str:
    """`text`, with its middle left out where it is longer than `longest` characters."""
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def draw_sweep(
    settings: Sequence[Mapping[str, str]],
    images_per_second: Sequence[float | str],
    waiting: Sequence[float | str],
    title: str,
    ceiling: float | None = None,
) -> bytes:
    """A PNG of images/s and waiting (a fraction of the time) by setting (swept key -> value, no two alike).

    A word in a number's place, such as "failed", is written where the bar would be. `ceiling` (images/s) is
    drawn as a dashed line. Matplotlib's global state is left alone. Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bars = _upright_bars(settings) or _level_bars(settings)
    figure = Figure((2 * bars.size[0], bars.size[1]), dpi=130, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    title = _plain(shorten(title, 100))
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    speed, wait = figure.subplots(1, 2, sharey=bars.level)
    heading = "Training speed (images/s, more is better)"
    speeds = [value for value in images_per_second if not isinstance(value, str)]
    highest = max([*speeds, ceiling or 0.0]) or 1.0
    if ceiling:
        heading += f"\ndashed: {_compact(ceiling)} if data were free"
        (speed.axvline if bars.level else speed.axhline)(ceiling, color=INK, linestyle="--", linewidth=1.2)
    _draw_panel(speed, bars, heading, images_per_second, highest, _compact)
    percents = [value if isinstance(value, str) else 100 * value for value in waiting]
    heading = "Waiting for data (% of the time, less is better)"
    _draw_panel(wait, bars, heading, percents, 100.0, "{:.1f}".format)
    if bars.legend:
        patches = [Patch(color=colour, label=_plain(label)) for label, colour in bars.legend.items()]
        name = _plain(bars.legend_title)
        figure.legend(handles=patches, title=name, loc="outside right center", frameon=False, fontsize=9)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _upright_bars(settings: Sequence[Mapping[str, str]]) -> Bars | None:
    """Groups by one key, and colours by the other where there are two; None where that is not readable."""
    # Names make the groups and numbers the colours, in whatever order the two were given.
    keys = sorted(settings[0], key=lambda key: all(as_number(s[key]) is not None for s in settings))
    if len(keys) > 2:
        return None
    groups = _ordered(setting[keys[0]] for setting in settings)
    series = _ordered(setting[key] for setting in settings for key in keys[1:]) or [""]
    width = 1 + len(groups) * max(0.1 * max(map(len, groups)), 0.38 * len(series) + 0.15)
    if width > WIDEST or len(series) > len(PALETTE):
        return None
    colours = dict(zip(series, PALETTE, strict=False))
    thickness = min(0.88 / len(series), 0.6)
    members = [setting[keys[1]] if len(keys) == 2 else "" for setting in settings]
    offsets = [thickness * (series.index(member) - (len(series) - 1) / 2) for member in members]
    return Bars(
        level=False,
        positions=[groups.index(s[keys[0]]) + offset for s, offset in zip(settings, offsets, strict=True)],
        thickness=thickness,
        colours=[colours[member] for member in members],
        ticks=dict(enumerate(groups)),
        size=(max(width, 4.8), 4.4),
        axis=keys[0],
        legend_title=keys[-1],
        legend=colours if len(keys) == 2 else {},
    )


def _level_bars(settings: Sequence[Mapping[str, str]]) -> Bars:
    """One bar a setting, labelled with it, from the top down in the order of the values."""
    ranks = {key: _ordered(setting[key] for setting in settings) for key in settings[0]}
    first = next(iter(ranks))
    colours = dict(zip(ranks[first], PALETTE, strict=False)) if len(ranks) > 1 else {}
    order = sorted(settings, key=lambda setting: [rank.index(setting[key]) for key, rank in ranks.items()])
    labels = [" ".join(f"{key}={shorten(value, 24)}" for key, value in s.items()) for s in settings]
    positions = [-float(order.index(setting)) for setting in settings]
    return Bars(
        level=True,
        positions=positions,
        thickness=0.72,
        colours=[colours.get(setting[first], PALETTE[0]) for setting in settings],
        ticks=dict(zip(positions, labels, strict=True)),
        size=(7.0, 1.4 + 0.26 * len(settings)),
    )


def _ordered(values: Iterable[str]) -> list[str]:
    """The distinct values: numbers first, by size, then words, as they were given."""
    return sorted(dict.fromkeys(values), key=lambda text: (as_number(text) is None, as_number(text) or 0.0))


def _draw_panel(
    axes: Axes,
    bars: Bars,
    heading: str,
    values: Sequence[float | str],
    highest: float,
    write: Callable[[float], str],
) -> None:
    for position, colour, value in zip(bars.positions, bars.colours, values, strict=True):
        missing = isinstance(value, str)
        length = 0.0 if missing else value
        draw = axes.barh if bars.level else axes.bar
        draw(position, length, bars.thickness, color=colour, edgecolor="white")
        axes.annotate(
            value if missing else write(value),
            xy=(length, position) if bars.level else (position, length),
            xytext=(4, 0) if bars.level else (0, 3),
            textcoords="offset points",
            ha="left" if bars.level else "center",
            va="center_baseline" if bars.level else "bottom",
            rotation=90 if missing and not bars.level else 0,
            color=FAILED if missing else INK,
            fontsize=8,
        )
    (axes.set_xlim if bars.level else axes.set_ylim)(0, 1.12 * highest)
    margin = 0.75 * bars.thickness
    ends = min(bars.positions) - margin, max(bars.positions) + margin
    (axes.set_ylim if bars.level else axes.set_xlim)(ends)
    along, across = (axes.xaxis, axes.yaxis) if bars.level else (axes.yaxis, axes.xaxis)
    across.set_ticks(list(bars.ticks), [_plain(label) for label in bars.ticks.values()])
    across.set_label_text(_plain(bars.axis))
    along.set_major_formatter("{x:,.10g}")
    along.grid(color="#e6e6e6", linewidth=0.8)
    if all(isinstance(value, str) for value in values):
        along.set_ticks([])  # nothing to measure
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9)
    axes.spines[["top", "right", "bottom" if bars.level else "left"]].set_visible(False)
    axes.set_title(heading, loc="left", fontsize=10.5, color=INK)


def _compact(number: float) -> str:
    """Three or four digits, short enough to stand on a narrow bar: 8.5, 950, 4,210, 12.3k, 1.25M."""
    if number >= 1e6:
        return f"{number / 1e6:.2f}M"
    if number >= 1e4:
        return f"{number / 1e3:.1f}k" if number < 1e5 else f"{number / 1e3:.0f}k"
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


def _plain(text: str) -> str:
    """`text` without the meaning that matplotlib gives to dollar signs."""
    return text.replace("$", r"\$")
