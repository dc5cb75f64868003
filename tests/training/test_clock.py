from types import SimpleNamespace

import pytest

from training import clock as module
from training.clock import FILE_MAKING, Clock


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    stand_in = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(module, "time", stand_in)
    return clock


def test_phases_add_up_to_the_run_and_one_inside_another_interrupts_it(clock):
    timed = Clock()
    clock.now += 1.0
    with timed.phase("start-up"):
        clock.now += 2.0
    timed.begin_training()
    with timed.phase("training"):
        clock.now += 4.0
        with timed.phase("checkpoint"):
            clock.now += 8.0
        clock.now += 16.0
    with timed.phase("evaluation"):
        clock.now += 32.0
    clock.now += 64.0
    assert timed.phases() == {
        "set-up": 1.0,
        "start-up": 2.0,
        "training": 20.0,
        "evaluation": 32.0,
        "checkpoint": 8.0,
        "the rest": 64.0,
    }
    assert sum(timed.phases().values()) == clock.now - 100.0


def test_files_that_a_dataset_makes_once_are_no_part_of_the_start_up(clock):
    timed = Clock()
    with timed.phase("start-up"):
        clock.now += 8.0
    timed.recount(5.0, "start-up", FILE_MAKING)
    assert timed.phases()["start-up"] == 3.0 and timed.phases()[FILE_MAKING] == 5.0
    assert sum(timed.phases().values()) == 8.0


def test_a_phase_ends_with_an_error_too(clock):
    timed = Clock()
    for phase, seconds in (("evaluation", 1.0), ("training", 2.0), ("training", 8.0)):
        with pytest.raises(ValueError, match="bad"), timed.phase(phase):
            clock.now += seconds
            raise ValueError("bad")
        clock.now += 1.0
    assert (timed.phases()["evaluation"], timed.phases()["set-up"], timed.phases()["training"]) == (1.0, 3.0, 10.0)


def test_watchers_get_each_phase_that_ends(clock):
    timed, seen = Clock(), []
    timed.watchers.append(lambda *phase: seen.append(phase))
    with timed.phase("evaluation"):
        clock.now += 1.0
    assert seen == [("set-up", 100.0, 100.0), ("evaluation", 100.0, 101.0)]
