"""Curves: the numbers of metrics.jsonl over the steps, as lines in the coordinates of an SVG picture."""

import math
from typing import Any, NamedTuple

LEFT = 48  # where the curves are, in a picture of 400 x 170
RIGHT = 392
TOP = 8
BOTTOM = 150
MOST_POINTS = 240  # points of a line; if there are more, the highest and the lowest of each part are drawn
MOST_CHARTS = 24
STEEP = 30  # a loss whose highest value is this many times its lowest one is drawn on a logarithmic scale
DECADES = 2  # a logarithmic scale of fewer decades has ticks between the powers of ten
SPLITS = ("train_", "val_", "test_")
TITLES = {  # of the charts that come last
    "lr": "learning rate",
    "images_per_second": "images/s",
    "data_wait_fraction": "waiting for data, % of a step",
}

Point = tuple[float, float]


class Chart(NamedTuple):
    """A picture. lines: their names, `points` of an SVG polyline, and (step, value, x, y) of each point.

    ticks: texts and y of the vertical axis. end: the last step.
    """

    title: str
    lines: list[dict[str, Any]]
    ticks: list[tuple[str, float]]
    end: str


def charts_of(rows: list[dict[str, Any]]) -> list[Chart]:
    """A chart for each score, with a line for each split. Values that are not finite numbers are left out."""
    series: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                scale = 100 if name == "data_wait_fraction" else 1
                series.setdefault(name, []).append((row["step"], scale * value))
    groups: dict[str, dict[str, list[Point]]] = {}
    for name in sorted(series, key=lambda name: (title_of(name) in TITLES.values(), title_of(name) != "loss")):
        groups.setdefault(title_of(name), {})[name] = series[name]
    last = max((row["step"] for row in rows), default=0)
    return [chart(title, lines, last) for title, lines in groups.items()][:MOST_CHARTS]


def title_of(name: str) -> str:
    """What is drawn in one chart has one title: test_loss and loss are both "loss", lr and lr_1 "learning rate"."""
    for split in SPLITS:
        name = name.removeprefix(split)
    return TITLES.get("lr" if name.startswith("lr_") else name, name)


def chart(title: str, series: dict[str, list[Point]], last: float) -> Chart:
    values = [value for points in series.values() for _, value in points]
    low = min(values)
    high = max(values)
    is_log = title == "loss" and low > 0 and high > STEEP * low
    if title in (TITLES["images_per_second"], TITLES["data_wait_fraction"]):
        low = 0.0
    if title == TITLES["data_wait_fraction"]:
        high = 100.0
    bottom, top = (math.log10(value) if is_log else value for value in (low, high))
    if bottom == top:  # a flat line is in the middle
        half = abs(top or 1) / 2
        bottom -= half
        top += half

    def x(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * step / (last or 1), 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - bottom) / (top - bottom), 1)

    lines = []
    for name, points in series.items():
        placed = [
            [step, number(value), x(step), y(math.log10(value) if is_log else value)] for step, value in thin(points)
        ]
        path = " ".join(f"{point[2]},{point[3]}" for point in placed)
        is_said = len(series) == 1 and title in TITLES.values()  # by the title, with its unit
        label = "" if is_said else name.replace("_", " ")
        lines.append({"name": label, "path": path, "points": placed, "last": number(points[-1][1])})
    places = log_ticks_between(bottom, top) if is_log else ticks_between(bottom, top)
    ticks = [(number(10**place if is_log else place), y(place)) for place in places]
    return Chart(f"{title}, logarithmic" if is_log else title, lines, ticks, number(last))


def thin(points: list[Point]) -> list[Point]:
    """The lowest and the highest point of each part, in their order; always the last point, too."""
    if len(points) <= MOST_POINTS:
        return points
    kept = list[Point]()
    size = math.ceil(2 * len(points) / MOST_POINTS)
    for start in range(0, len(points), size):
        part = points[start : start + size]
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def ticks_between(low: float, high: float, least: float = 0.0) -> list[float]:
    """One to seven round numbers from `low` to `high`, at least `least` apart."""
    rough = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(least, power, *(power * factor for factor in (2, 5) if power * factor <= rough))
    first = math.ceil(low / step)
    return [step * count for count in range(first, math.floor(high / step) + 1)]


def log_ticks_between(low: float, high: float) -> list[float]:
    """The logarithms of round numbers, from `low` to `high`: of powers of ten if these are enough."""
    if high - low >= DECADES:
        return ticks_between(low, high, least=1.0)
    powers = range(math.floor(low), math.ceil(high))
    ticks = [power + math.log10(factor) for power in powers for factor in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def number(value: float | None) -> str:
    """The number in four digits; an empty text for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
