"""Timeline records what workers, preloader, device and training loop do, and each batch on its way through them."""

import pytest
import torch
from example_datasets import Numbers

from loaders import Preloader, StepTimer, Timeline, WorkerLoader
from loaders.work import WorkClock


def test_a_worker_clock_tells_computing_and_idling_apart(clock):
    work_clock = WorkClock()
    clock.now = 2.0
    work_clock.begin()
    clock.now = 5.0
    clock.cpu = 0.5
    work = work_clock.end(0.25)
    assert (work.began, work.seconds, work.cpu_seconds, work.collate_seconds) == (2.0, 3.0, 0.5, 0.25)
    assert work.wait_seconds == 2.0
    clock.now = 6.0
    work_clock.begin()
    assert work_clock.end(0.0).wait_seconds == 1.0, "it was idle for a second"


def test_what_ended_before_the_start_and_began_after_the_end_is_left_out(clock):
    recorded = Timeline()
    recorded.add("worker 0", "read", 0.0, 1.0, (0, 0))
    clock.now = 2.0
    recorded.begin()
    recorded.add("worker 0", "read", 1.5, 2.5, (0, 1))
    recorded.add("worker 1", "read", 1.0, 2.25, (0, 2))
    clock.now = 3.0
    recorded.close()
    recorded.add("worker 0", "read", 2.5, 2.9, (0, 3))  # known only after the end
    recorded.add("worker 0", "read", 3.0, 3.5, (0, 4))
    assert [span.batch for span in recorded.spans()] == [(0, 2), (0, 1), (0, 3)]
    assert not recorded.is_open


@pytest.mark.parametrize(
    ("settings", "depth"),
    [({"num_workers": 2, "shuffle": True}, 0), ({"num_workers": 2, "worker_method": "thread"}, 2), ({}, 0)],
)
def test_each_batch_can_be_followed_from_its_worker_to_its_step(settings, depth):
    recorded = Timeline()
    loader = WorkerLoader(Numbers(24), 8, seed=0, **settings)
    with Preloader(loader, "cpu", depth=depth, transform=lambda batch, _: batch) as preloader:
        preloader.timeline = recorded
        timer = StepTimer(torch.device("cpu"), 0, recorded, timeline_steps=6)
        for _ in range(2):
            for _ in timer.batches(preloader):
                pass
        assert preloader.timeline is recorded
    batches = {(epoch, number) for epoch in range(2) for number in range(3)}
    spans = recorded.spans()
    for activity in ("read", "copy", "transform", "compute"):
        assert {span.batch for span in spans if span.activity == activity} == batches
    lanes = {span.lane for span in spans if span.activity == "transform"}
    assert lanes == {Timeline.PRELOADER if depth else Timeline.TRAINING}
    for batch in batches:
        read, copied, step = (
            next(span for span in spans if span.batch == batch and span.activity == activity)
            for activity in ("read", "copy", "compute")
        )
        assert read.start <= read.end <= copied.start <= copied.end <= step.start <= step.end
    assert not recorded.is_open


@pytest.mark.parametrize(
    "settings", [{"seed": 0}, {"seed": 0, "shuffle": True}, {"seed": None, "persistent_workers": True}]
)
def test_a_timeline_that_is_set_between_two_epochs_records_the_second(settings):
    with WorkerLoader(Numbers(24), 8, num_workers=1, worker_method="thread", **settings) as loader:
        list(loader)
        loader.timeline = recorded = Timeline()
        list(loader)
    assert len([span for span in recorded.spans() if span.activity == "read"]) == 3


def test_a_timeline_begins_after_the_warm_up_and_ends_after_its_steps(clock):
    recorded = Timeline()
    timer = StepTimer(torch.device("cpu"), 2, recorded, timeline_steps=3)
    for number, _ in enumerate(timer.batches([torch.zeros(1)] * 8)):
        clock.now = float(number + 1)
    assert (recorded.start, recorded.end) == (2.0, 5.0)
