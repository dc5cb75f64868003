"""The timeline of a run, and its picture and trace of given spans."""

import json
from collections import namedtuple

import pytest

from extras.timeline.timeline import (
    COPY_STREAM,
    GPU,
    MOST_STEPS,
    PRELOADER,
    TRAINING,
    draw_timeline,
    lanes_of,
    title_of,
    trace,
)
from tests.configs import train
from training.config import ConfigError

Span = namedtuple("Span", "lane activity start end batch")
SPANS = [
    Span("worker 1", "read", 10.00, 10.04, (0, 1)),
    Span("worker 0", "read", 10.01, 10.03, (0, 0)),
    Span("worker 1", "collate", 10.04, 10.05, (0, 1)),
    Span(TRAINING, "wait", 10.01, 10.04, (0, 0)),
    Span(TRAINING, "transform", 10.03, 10.04, None),
    Span(PRELOADER, "copy", 10.03, 10.04, (0, 0)),
    Span(TRAINING, "compute", 10.04, 10.05, (0, 0)),
    Span(TRAINING, "wait", 10.05, 10.06, (0, 1)),
    Span(TRAINING, "compute", 10.06, 10.07, (0, 1)),
]
TIMELINE = "+callbacks.timeline={_target_: extras.timeline.timeline.TimelinePicture, steps: %d}"


def test_a_run_writes_a_picture_and_a_trace_of_its_workers_steps_and_evaluation(tmp_path):
    summary = train(tmp_path, TIMELINE % 8, "timing.warmup_steps=2", "loader=workers", "loader.num_workers=1")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = {(names[event["tid"]], event["name"]) for event in events if event["ph"] == "X"}
    lanes = {("worker 0", "read"), (TRAINING, "wait"), (TRAINING, "compute"), (TRAINING, "evaluation")}
    assert lanes <= spans
    assert sum(event["ph"] == "X" and event["name"] == "compute" for event in events) == 8
    assert summary["images_per_second"] > 0, "the timer that the timeline put in place gives the run's figures"


def test_without_steps_nothing_is_recorded_and_a_negative_number_is_refused(tmp_path):
    train(tmp_path, TIMELINE % 0, "train.max_steps=2")
    assert not list(tmp_path.glob("timeline.*"))
    with pytest.raises(ConfigError, match=r"callbacks\.timeline\.steps=-1"):
        train(tmp_path, TIMELINE % -1)


def test_lanes_are_in_the_order_in_which_a_batch_passes_through_them():
    lanes = [TRAINING, GPU, "worker 10", PRELOADER, "worker 2", COPY_STREAM]
    spans = [Span(lane, "read", 0.0, 1.0, None) for lane in lanes]
    assert lanes_of(spans) == ["worker 2", "worker 10", PRELOADER, COPY_STREAM, GPU, TRAINING]


def test_the_trace_has_every_span_in_microseconds_on_its_lane_and_arrows_that_follow_a_batch_to_its_step():
    events = json.loads(trace(SPANS))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    shown = [event for event in events if event["ph"] == "X"]
    assert [(names[event["tid"]], event["name"]) for event in shown] == [span[:2] for span in SPANS]
    assert [event["ts"] for event in shown] == pytest.approx([1e6 * (span.start - 10) for span in SPANS])
    assert [event["dur"] for event in shown] == pytest.approx([1e6 * (span.end - span.start) for span in SPANS])
    ways = {}
    for event in events:
        if event["name"] == "batch":
            ways.setdefault(event["id"], []).append((event["ph"], names[event["tid"]]))
    assert ways == {
        "0.0": [("s", "worker 0"), ("t", PRELOADER), ("t", TRAINING)],
        "0.1": [("s", "worker 1"), ("t", TRAINING)],
    }


def test_the_title_says_how_much_of_the_time_was_waiting():
    assert draw_timeline(SPANS).startswith(b"\x89PNG") and draw_timeline([]).startswith(b"\x89PNG")
    spans = [span for span in SPANS if span.lane == TRAINING]
    title = "2 training steps: 33% computing, 50% waiting for the loader (red), 17% making batches ready"
    assert title_of(spans) == title
    assert "100% computing, 0% waiting" in title_of([span for span in spans if span.activity == "compute"])


def test_of_a_long_recording_only_the_first_steps_are_drawn():
    steps = [Span(TRAINING, "compute", float(number), number + 1.0, (0, number)) for number in range(MOST_STEPS)]
    later = [Span(TRAINING, "compute", 100.0 + number, 101.0 + number, (0, number)) for number in range(9)]
    assert draw_timeline([*steps, *later]) == draw_timeline(steps)
