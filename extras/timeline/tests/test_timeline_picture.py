import json

import pytest

from loaders import Timeline
from loaders.timeline import COPY_STREAM, GPU, PRELOADER, TRAINING, Span
from training.callbacks.timeline import MOST_STEPS, add_phase, draw_timeline, lanes_of, trace

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


def test_lanes_are_in_the_order_in_which_a_batch_passes_through_them():
    lanes = [TRAINING, GPU, "worker 10", PRELOADER, "worker 2", COPY_STREAM]
    spans = [Span(lane, "read", 0.0, 1.0, None) for lane in lanes]
    assert lanes_of(spans) == ["worker 2", "worker 10", PRELOADER, COPY_STREAM, GPU, TRAINING]


def test_the_trace_has_every_span_in_microseconds_on_its_lanes_thread_and_arrows_that_follow_a_batch_to_its_step():
    events = json.loads(trace(SPANS))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    shown = [event for event in events if event["ph"] == "X"]
    assert [(names[event["tid"]], event["name"]) for event in shown] == [span[:2] for span in SPANS]
    assert [event["ts"] for event in shown] == pytest.approx([1e6 * (span.start - 10) for span in SPANS])
    assert [event["dur"] for event in shown] == pytest.approx([1e6 * (span.end - span.start) for span in SPANS])
    assert [event["args"]["batch"] for event in shown] == [span.batch and span.batch[1] for span in SPANS]
    ways = {}
    for event in events:
        if event["name"] == "batch":
            ways.setdefault(event["id"], []).append((event["ph"], names[event["tid"]]))
    assert ways == {
        "0.0": [("s", "worker 0"), ("t", PRELOADER), ("t", TRAINING)],
        "0.1": [("s", "worker 1"), ("t", TRAINING)],
    }


def test_the_pictures_title_says_how_much_of_the_time_was_waiting(drawn):
    assert draw_timeline(SPANS).startswith(b"\x89PNG")
    title = "2 training steps: 33% computing, 50% waiting for the loader (red), 17% making batches ready"
    assert drawn[0].get_suptitle() == title
    draw_timeline([span for span in SPANS if span.activity != "wait"])
    assert "100% computing, 0% waiting for the loader" in drawn[1].get_suptitle()


def test_the_picture_has_a_lane_each_and_a_line_from_each_batch_to_its_step(drawn):
    draw_timeline(SPANS)
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["worker 0", "worker 1", PRELOADER, TRAINING]
    ways = [line.get_xydata().tolist() for line in axes.get_lines()]
    assert [[round(time) for time, _ in way] for way in ways] == [[20, 30], [40, 50]]
    assert [round(way[0][1]) for way in ways] == [0, 1]


def test_only_the_first_steps_of_a_long_recording_are_drawn(drawn):
    steps = [Span(TRAINING, "compute", float(number), number + 1.0, (0, number)) for number in range(100)]
    draw_timeline(steps)
    assert drawn[0].axes[0].get_xlim() == (0.0, 1000.0 * MOST_STEPS)


def test_a_timeline_shows_evaluations_and_checkpoints():
    timeline = Timeline()
    for number, phase in enumerate(("evaluation", "training", "checkpoint")):
        add_phase(timeline, phase, number, number + 1)
    assert [span.activity for span in timeline.spans()] == ["evaluation", "checkpoint"]
