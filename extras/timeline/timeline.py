"""Draws what the first timed steps of a run did (timeline.png), and writes them as a trace (timeline.json)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from data.errors import Range, check_range
from loaders import StepTimer, Timeline
from training.config import ConfigError
from training.figure import INK, new_figure, png
from training.files import write_whole
from training.run import Run

# The lanes that a Timeline of the loaders has, besides one for each worker. Its spans have lane, activity, start, end,
# and batch: the epoch and the number in it, or None.
TRAINING, PRELOADER, COPY_STREAM, GPU = "training loop", "preloader", "copy stream", "GPU"
PALE = "#8a8a8a"
ACTIVITIES = {  # their meanings and colors; a later one covers an earlier one
    "wait": ("waiting for the loader", "#d62728"),
    "compute": ("training step", "#2c7fb8"),
    "read": ("reading samples", "#a1d99b"),
    "collate": ("collating", "#31a354"),
    "copy": ("copying to the device", "#fdae6b"),
    "transform": ("transform", "#9e9ac8"),
    "evaluation": ("evaluation", "#d9d9d9"),
    "checkpoint": ("saving a checkpoint", "#969696"),
}
NUMBERED = {"read": INK, "compute": "white"}  # the colors of a batch's number
TALLEST = 6.0  # inches of all lanes: with many workers each is lower
MOST_STEPS = 24  # in the picture; timeline.json has all


class TimelinePicture:
    """Records `steps` steps after the warm-up, and writes both files when the run ends; 0: none."""

    def __init__(self, steps: int = 0) -> None:
        check_range("callbacks.timeline.steps", steps, Range(0), ConfigError)
        self.steps = steps
        self.timeline: Timeline | None = None

    def on_start(self, run: Run) -> None:
        if self.steps:
            device, untimed = run.processes.device, run.config.timing.warmup_steps
            self.timeline = run.train_loader.timeline = Timeline(device)
            run.timer = StepTimer(device, untimed, self.timeline, self.steps)
            run.clock.watchers.append(self._add_phase)

    def _add_phase(self, phase: str, start: float, end: float) -> None:
        if self.timeline is not None and phase in ("evaluation", "checkpoint"):
            self.timeline.add(TRAINING, phase, start, end, None)

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        if self.timeline is not None and run.is_main and (spans := self.timeline.spans()):
            write_whole(run.folder / "timeline.json", trace(spans))
            write_whole(run.folder / "timeline.png", draw_timeline(spans))


def lanes_of(spans: Sequence[Any]) -> list[str]:
    """The names of the lanes, from top to bottom in the order of a batch: workers, preloader, device, training."""
    order = [PRELOADER, COPY_STREAM, GPU, TRAINING]
    lanes = {span.lane for span in spans}
    workers = sorted(lanes - set(order), key=lambda lane: (len(lane), lane))
    return [*workers, *(lane for lane in order if lane in lanes)]


def trace(spans: Sequence[Any]) -> str:
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


def draw_timeline(spans: Sequence[Any]) -> bytes:
    """A PNG with a lane for each worker, the preloader, the device and the training loop, in milliseconds.

    The numbers count the batches of an epoch. A line leads from the end of reading a batch to its step, if both are in
    the picture: with many workers batches are read long before.
    """
    consumer = GPU if any(span.lane == GPU for span in spans) else TRAINING
    own = [span for span in spans if span.lane == consumer and span.activity in ("wait", "compute")]
    start = own[0].start if own else 0.0
    ends = [span.end for span in own if span.activity == "compute"][:MOST_STEPS]
    end = ends[-1] if ends else start + 1e-3
    spans = [  # their parts in the picture, in milliseconds
        span._replace(start=1000 * (max(span.start, start) - start), end=1000 * (min(span.end, end) - start))
        for span in spans
        if span.end > start and span.start < end
    ]
    lanes, width = lanes_of(spans), 1000 * (end - start)
    least = 0.012 * width  # of a span that has room for its number
    height = len(lanes) or 1
    figure = new_figure(
        title_of([span for span in spans if span.lane == consumer]), 14, 1.9 + min(0.62 * height, TALLEST)
    )
    axes = figure.subplots()
    for activity, (meaning, color) in ACTIVITIES.items():
        if shown := [span for span in spans if span.activity == activity and span.end - span.start > least / 20]:
            parts = [(lanes.index(span.lane), span.end - span.start, 0.62, span.start) for span in shown]
            style = {"color": color, "edgecolor": "white", "linewidth": 0.5, "label": meaning}
            bars = axes.barh(*zip(*parts, strict=True), **style)
            if activity in NUMBERED:
                numbers = [str(one.batch[1]) if one.batch and one.end - one.start > least else "" for one in shown]
                axes.bar_label(bars, numbers, label_type="center", fontsize=8, color=NUMBERED[activity])
    read = {  # when and in which row a batch was read
        span.batch: (span.end, lanes.index(span.lane) + 0.31) for span in spans if span.activity in ("read", "collate")
    }
    caption = "milliseconds; numbers count batches"
    for step in spans:
        if step.lane == consumer and step.activity == "compute" and step.batch in read:
            way = read[step.batch], (step.start, lanes.index(consumer) - 0.31)
            axes.plot(*zip(*way, strict=True), color=PALE, linewidth=0.7, zorder=0)
            caption = "milliseconds; numbers count batches, and a line follows a batch to its step"
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(height - 0.5, -0.5)
    axes.set_xlim(0, width)
    axes.set_xlabel(caption)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=len(ACTIVITIES), frameon=False, fontsize=9)
    return png(figure)


def title_of(spans: Sequence[Any]) -> str:
    """How many steps there are in the lane of the training loop or of the GPU, and what its time was spent on."""
    seconds = dict.fromkeys(ACTIVITIES, 0.0)
    for span in spans:
        seconds[span.activity] += span.end - span.start
    steps, preparing = sum(span.activity == "compute" for span in spans), seconds["copy"] + seconds["transform"]
    total = seconds["wait"] + seconds["compute"] or 1.0  # preparing is a part of the waiting
    waiting = (seconds["wait"] - preparing) / total
    shares = f"{seconds['compute'] / total:.0%} computing, {waiting:.0%} waiting for the loader (red)"
    return f"{steps} training steps: {shares}" + (
        f", {preparing / total:.0%} making batches ready" if preparing > 0.01 * total else ""
    )
