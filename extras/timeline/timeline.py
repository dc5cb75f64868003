"""Draws what the first timed steps of a run did (timeline.png), and writes them as a trace (timeline.json)."""

import json
from collections.abc import Sequence
from typing import Any

from data.errors import Range, check_range
from loaders import StepTimer, Timeline
from training.files import write_whole
from training.look import INK, new_figure, png
from training.run import Run

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
        check_range("callbacks.timeline.steps", steps, Range(0))
        self.steps = steps
        self.timeline: Timeline | None = None

    def on_start(self, run: Run) -> None:
        if self.steps:
            device = run.processes.device
            self.timeline = run.train_loader.timeline = Timeline(device)
            run.timer = StepTimer(device, run.config.timing.warmup_steps, self.timeline, self.steps)
            run.clock.watchers.append(self._add_phase)

    def _add_phase(self, phase: str, start: float, end: float) -> None:
        if self.timeline is not None and phase in ("evaluation", "checkpoint"):
            self.timeline.add(Timeline.TRAINING, phase, start, end, None)

    def on_end(self, run: Run, summary: dict[str, Any] | None) -> None:
        if self.timeline is None or not run.is_main:
            return
        spans = self.timeline.spans()
        if spans:
            write_whole(run.folder / "timeline.json", trace(spans))
            write_whole(run.folder / "timeline.png", draw_timeline(spans))


def lanes_of(spans: Sequence[Any]) -> list[str]:
    """The names of the lanes, from top to bottom in the order of a batch: workers, preloader, device, training."""
    order = [Timeline.PRELOADER, Timeline.COPY_STREAM, Timeline.GPU, Timeline.TRAINING]
    lanes = {span.lane for span in spans}
    workers = sorted(lanes - set(order), key=lambda lane: (len(lane), lane))
    return [*workers, *(lane for lane in order if lane in lanes)]


def trace(spans: Sequence[Any]) -> str:
    """A trace in Chrome's JSON format: a thread per lane, times in microseconds, arrows that follow each batch."""
    lanes = lanes_of(spans)
    zero = min((span.start for span in spans), default=0.0)
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

    The numbers count the batches of an epoch; those of the next epoch have a plus sign. A line leads from the end of
    reading a batch to its step, if both are in the picture: with many workers batches are read long before.
    """
    has_gpu = any(span.lane == Timeline.GPU for span in spans)
    consumer = Timeline.GPU if has_gpu else Timeline.TRAINING
    consumed = [span for span in spans if span.lane == consumer and span.activity in ("wait", "compute")]
    start = consumed[0].start if consumed else 0.0
    epoch = consumed[0].batch[0] if consumed and consumed[0].batch else 0
    ends = [span.end for span in consumed if span.activity == "compute"][:MOST_STEPS]
    end = ends[-1] if ends else start + 1e-3
    width = 1000 * (end - start)
    shown = []  # the parts of the spans that are in the picture, in milliseconds
    for span in spans:
        if span.end > start and span.start < end:
            begins = 1000 * (span.start - start)
            ends_at = 1000 * (span.end - start)
            shown.append(span._replace(start=max(0, begins), end=min(width, ends_at)))
    rows = {lane: row for row, lane in enumerate(lanes_of(shown))}
    height = len(rows) or 1
    title = title_of([span for span in shown if span.lane == consumer])
    figure = new_figure(title, 14, 1.9 + min(0.62 * height, TALLEST))
    axes = figure.subplots()
    least = 0.012 * width  # milliseconds of a span that has room for its number
    for activity, (meaning, color) in ACTIVITIES.items():
        visible = [span for span in shown if span.activity == activity and span.end - span.start > least / 20]
        if not visible:
            continue
        lengths = [span.end - span.start for span in visible]
        bars = axes.barh(
            [rows[span.lane] for span in visible],
            lengths,
            0.62,
            [span.start for span in visible],
            color=color,
            edgecolor="white",
            linewidth=0.5,
            label=meaning,
        )
        if activity in NUMBERED:
            numbers = [
                number_of(span.batch, epoch) if span.batch and length > least else ""
                for span, length in zip(visible, lengths, strict=True)
            ]
            axes.bar_label(bars, numbers, label_type="center", fontsize=8, color=NUMBERED[activity])
    reading_ends = {}  # when each batch was read, and the height of the line's beginning
    for span in shown:
        if span.activity in ("read", "collate"):
            reading_ends[span.batch] = (span.end, rows[span.lane] + 0.31)
    caption = "milliseconds; numbers count batches"
    if any(text.get_text().startswith("+") for text in axes.texts):
        caption += ", + is the next epoch"
    has_lines = False
    for span in shown:
        if span.lane == consumer and span.activity == "compute" and span.batch in reading_ends:
            x, y = reading_ends[span.batch]
            axes.plot([x, span.start], [y, rows[consumer] - 0.31], color=PALE, linewidth=0.7, zorder=0)
            has_lines = True
    if has_lines:
        caption += ", and a line follows a batch to its step"
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(height - 0.5, -0.5)
    axes.set_xlim(0, width)
    axes.set_xlabel(caption)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if axes.containers:  # matplotlib warns of a legend without bars
        figure.legend(loc="outside lower left", ncols=len(ACTIVITIES), frameon=False, fontsize=9)
    return png(figure)


def number_of(batch: tuple[int, int], epoch: int) -> str:
    """A batch's number in its epoch, with a plus sign for each epoch after `epoch`."""
    return "+" * (batch[0] - epoch) + str(batch[1])


def title_of(spans: Sequence[Any]) -> str:
    """The number of steps in the lane of the training loop or of the GPU, and how its time was spent."""
    steps = 0
    durations = dict.fromkeys(ACTIVITIES, 0.0)
    for span in spans:
        durations[span.activity] += span.end - span.start
        if span.activity == "compute":
            steps += 1
    preparing = durations["copy"] + durations["transform"]  # a part of the waiting
    total = durations["wait"] + durations["compute"] or 1.0
    computing = durations["compute"] / total
    waiting = (durations["wait"] - preparing) / total
    title = f"{steps} training steps: {computing:.0%} computing, {waiting:.0%} waiting for the loader (red)"
    if preparing > 0.01 * total:
        title += f", {preparing / total:.0%} making batches ready"
    return title
