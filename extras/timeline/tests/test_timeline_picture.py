"""The timeline of a run, and its picture and trace of given spans."""

import json
import struct
from collections import namedtuple

import pytest

from extras.timeline import timeline
from extras.timeline.timeline import draw_timeline, lanes_of, trace
from loaders import Timeline
from tests.configs import train
from tests.data.reading import refused

TRAINING, PRELOADER, COPY_STREAM, GPU = Timeline.TRAINING, Timeline.PRELOADER, Timeline.COPY_STREAM, Timeline.GPU

Span = namedtuple("Span", "lane activity start end batch")
SPANS = [
    Span("worker 1", "read", 10.00, 10.04, (0, 1)),
    Span("worker 0", "read", 10.01, 10.03, (0, 0)),
    Span("worker 1", "collate", 10.04, 10.05, (0, 1)),
    Span(TRAINING, "wait", 10.01, 10.04, (0, 0)),
    Span(PRELOADER, "copy", 10.03, 10.04, (0, 0)),
    Span(TRAINING, "compute", 10.04, 10.05, (0, 0)),
    Span(TRAINING, "compute", 10.06, 10.07, (0, 1)),
]
TIMELINE = "+callbacks.timeline={_target_: extras.timeline.timeline.TimelinePicture, steps: %d}"


def test_the_picture_of_many_workers_is_wider_than_tall():
    many = [Span(f"worker {number}", "read", 10.0, 10.3, (0, 20 + number)) for number in range(16)]
    picture = draw_timeline([*many, *SPANS])
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 1.5 * height


def test_batches_of_the_next_epoch_have_a_plus_sign_in_the_picture(monkeypatch):
    monkeypatch.setattr(timeline, "png", lambda figure: figure)
    read_early = Span("worker 0", "read", 10.04, 10.07, (1, 7))
    (axes,) = draw_timeline([*SPANS, read_early]).axes
    assert {text.get_text() for text in axes.texts} - {""} == {"0", "1", "+7"}
    assert "+ is the next epoch" in axes.get_xlabel()
    (axes,) = draw_timeline(SPANS).axes
    assert "epoch" not in axes.get_xlabel()


def test_a_run_writes_a_picture_and_a_trace_of_its_workers_steps_and_evaluation(tmp_path):
    summary = train(tmp_path, TIMELINE % 8, "timing.warmup_steps=2 loader=workers loader.num_workers=1")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(names[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
    assert {("worker 0", "read"), (TRAINING, "wait"), (TRAINING, "evaluation")} <= set(spans)
    assert spans.count((TRAINING, "compute")) == 8
    assert summary["images_per_second"] > 0, "the timer that the timeline put in place gives the run's figures"


def test_without_steps_nothing_is_recorded_and_a_negative_number_is_refused(tmp_path):
    train(tmp_path, TIMELINE % 0, "train.max_steps=2")
    assert not list(tmp_path.glob("timeline.*"))
    with refused(r"callbacks\.timeline\.steps=-1"):
        train(tmp_path, TIMELINE % -1)


def test_the_trace_has_every_span_in_microseconds_on_its_lane_and_arrows_that_follow_a_batch_to_its_step():
    events = json.loads(trace(SPANS))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    shown = [event for event in events if event["ph"] == "X"]
    assert [(names[event["tid"]], event["name"]) for event in shown] == [span[:2] for span in SPANS]
    assert [event["ts"] for event in shown] == pytest.approx([1e6 * (span.start - 10) for span in SPANS])
    assert [event["dur"] for event in shown] == pytest.approx([1e6 * (span.end - span.start) for span in SPANS])
    ways = [(event["id"], event["ph"], names[event["tid"]]) for event in events if event["name"] == "batch"]
    first = [("0.0", "s", "worker 0"), ("0.0", "t", PRELOADER), ("0.0", "t", TRAINING)]
    assert sorted(ways) == [*first, ("0.1", "s", "worker 1"), ("0.1", "t", TRAINING)]
    lanes = [TRAINING, GPU, "worker 10", PRELOADER, "worker 2", COPY_STREAM]
    in_order = ["worker 2", "worker 10", PRELOADER, COPY_STREAM, GPU, TRAINING]
    assert lanes_of([Span(lane, "read", 0.0, 1.0, None) for lane in lanes]) == in_order


@pytest.mark.filterwarnings("error", "ignore::DeprecationWarning")  # libraries of matplotlib have some
def test_a_picture_without_a_measured_step_is_empty_and_warns_of_nothing():
    assert draw_timeline([]).startswith(b"\x89PNG")
