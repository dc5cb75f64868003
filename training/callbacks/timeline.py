"""timing.timeline: draws what the first steps of a run did, and writes it as a trace for Perfetto.

See conf/callbacks/standard/timeline.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from loaders.timeline import COPY_STREAM, GPU, PRELOADER, TRAINING, Span, Timeline
from loaders.timing import StepTimer
from training.config import Keys, check_least
from training.figure import INK, new_figure, png
from training.files import write_whole
from training.run import Run

PALE = "#8a8a8a"
COLORS = {
    "wait": "#d62728",
    "compute": "#2c7fb8",
    "read": "#a1d99b",
    "collate": "#31a354",
    "copy": "#fdae6b",
    "transform": "#9e9ac8",
    "evaluation": "#d9d9d9",
    "checkpoint": "#969696",
}
MEANINGS = {
    "wait": "waiting for a batch",
    "compute": "training step",
    "read": "reading samples",
    "collate": "collating",
    "copy": "copying to the device",
    "transform": "transform",
    "evaluation": "evaluation",
    "checkpoint": "saving a checkpoint",
}
MOST_STEPS = 24  # in the picture; timeline.json has all


@dataclass
class TimelineKeys(Keys):
    timeline: int

    def __post_init__(self) -> None:
        check_least("timing.timeline", self.timeline, 0)
        super().__post_init__()


class TimelinePicture:
    """Records `timing.timeline` steps, and writes timeline.png and timeline.json at the end of the run; 0: none."""

    keys: ClassVar = {"timing": TimelineKeys}

    def __init__(self) -> None:
        self.timeline: Timeline | None = None

    def on_start(self, run: Run) -> None:
        timing, device = run.config.timing, run.processes.device
        if timing.timeline:
            self.timeline = run.train_loader.timeline = Timeline(device)
            run.timer = StepTimer(device, timing.warmup_steps, self.timeline, timing.timeline)
            run.clock.watchers.append(self.add_phase)

    def add_phase(self, phase: str, start: float, end: float) -> None:
        if self.timeline is not None and phase in ("evaluation", "checkpoint"):
            self.timeline.add(TRAINING, phase, start, end, None)

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        if self.timeline is not None and run.is_main and (summary is not None or run.stopped):
            spans = self.timeline.spans()
            write_whole(run.folder / "timeline.json", trace(spans))
            write_whole(run.folder / "timeline.png", draw_timeline(spans))


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """The names of the lanes, from top to bottom in the order of a batch: workers, preloader, device, training."""
    order = [PRELOADER, COPY_STREAM, GPU, TRAINING]
    lanes = {span.lane for span in spans}
    workers = sorted(lanes - set(order), key=lambda lane: (len(lane), lane))
    return [*workers, *(lane for lane in order if lane in lanes)]


def trace(spans: Sequence[Span]) -> str:
    """A trace in Chrome's JSON format: a thread per lane, times in microseconds, arrows that follow each batch."""
    lanes, zero = lanes_of(spans), min((span.start for span in spans), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(lanes)
    ]
    started: set[tuple[int, int]] = set()
    for span in spans:
        place = {"pid": 0, "tid": lanes.index(span.lane), "ts": 1e6 * (span.start - zero)}
        epoch, number = span.batch or (None, None)
        event = {"name": span.activity, "ph": "X", "dur": 1e6 * (span.end - span.start), **place}
        events.append({**event, "args": {"epoch": epoch, "batch": number}})
        if span.batch is not None and span.activity not in ("wait", "collate"):
            flow = {"name": "batch", "cat": "batch", "id": f"{epoch}.{number}", **place}
            events.append({**flow, "ph": "t" if span.batch in started else "s"})
            started.add(span.batch)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def draw_timeline(spans: Sequence[Span]) -> bytes:
    """A PNG with a lane for each worker, the preloader, the device and the training loop, in milliseconds.

    The numbers count the batches of an epoch. A line leads from the end of reading a batch to its step.
    """
    from matplotlib.patches import Patch

    consumer = GPU if any(span.lane == GPU for span in spans) else TRAINING
    steps = [span for span in spans if span.lane == consumer and span.activity == "compute"][:MOST_STEPS]
    waits = [span for span in spans if span.lane == consumer and span.activity == "wait"]
    start = min((span.start for span in [*waits[:1], *steps[:1]]), default=0.0)
    end = steps[-1].end if steps else start + 1e-3
    spans = [span for span in spans if span.end > start and span.start < end]
    lanes = lanes_of(spans)
    within = [span for span in spans if span.lane == consumer and span.activity in ("copy", "transform")]
    waiting, preparing = (
        sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in kind) for kind in (waits, within)
    )
    training = waiting + sum(span.end - span.start for span in steps)
    title = _title(len(steps), (waiting - preparing) / (training or 1.0), preparing / (training or 1.0))
    figure = new_figure(title, 14, 1.9 + 0.62 * max(1, len(lanes)))
    axes = figure.subplots()
    centered: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    for span in spans:
        row, left = lanes.index(span.lane), max(span.start, start)
        width = min(span.end, end) - left
        color, left_ms = COLORS[span.activity], 1000 * (left - start)
        axes.barh(row, 1000 * width, 0.62, left_ms, color=color, edgecolor="white", linewidth=0.5)
        if span.batch is not None and span.activity in ("read", "compute") and width > 0.012 * (end - start):
            middle = 1000 * (left + width / 2 - start)
            ink = "white" if span.activity == "compute" else INK
            axes.text(middle, row, str(span.batch[1]), color=ink, **centered)
    for line in _paths(spans, lanes, consumer, start, end):
        axes.plot(*line, color=PALE, linewidth=0.7, zorder=0)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)
    axes.set_xlim(0, 1000 * (end - start))
    axes.set_xlabel("milliseconds; numbers count batches, and a line follows a batch to its step")
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    shown = [activity for activity in COLORS if any(span.activity == activity for span in spans)]
    handles = [Patch(color=COLORS[activity], label=MEANINGS[activity]) for activity in shown]
    handles.append(Patch(facecolor="white", edgecolor=PALE, label="nothing to do"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    return png(figure)


def _title(steps: int, waiting: float, preparing: float) -> str:
    shares = [f"{1 - waiting - preparing:.0%} computing", f"{waiting:.0%} waiting for batches (red)"]
    if preparing > 0.01:
        shares.append(f"{preparing:.0%} making them ready")
    return f"{steps} training steps: {', '.join(shares)}"


def _paths(
    spans: Sequence[Span], lanes: Sequence[str], consumer: str, start: float, end: float
) -> list[tuple[list[float], list[float]]]:
    """A line for each batch, from the end of reading to the start of its step: its times in ms, and its rows."""
    read = {span.batch: span for span in spans if span.activity in ("read", "collate")}
    paths = []
    for step in spans:
        if step.lane == consumer and step.activity == "compute" and step.batch in read:
            origin = read[step.batch]
            rows = [lanes.index(origin.lane) + 0.31, lanes.index(consumer) - 0.31]
            paths.append(([1000 * (max(time, start) - start) for time in (origin.end, step.start)], rows))
    return paths
