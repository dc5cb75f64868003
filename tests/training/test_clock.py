from types import SimpleNamespace

import pytest

from training import clock as module
from training.clock import FILE_MAKING, Clock


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_phases_add_up_to_the_run_and_one_inside_another_interrupts_it(clock):
    timed, seen = Clock(), []
    timed.watchers.append(lambda *phase: seen.append(phase))
    clock.now += 1.0
    with timed.phase("start-up"):
        clock.now += 7.0
    timed.recount(5.0, "start-up", FILE_MAKING)
    timed.begin_training()
    with timed.phase("training"):
        clock.now += 4.0
        with pytest.raises(ValueError, match="bad"), timed.phase("checkpoint"):
            clock.now += 8.0
            raise ValueError("bad")
        clock.now += 16.0
    with timed.phase("evaluation"):
        clock.now += 32.0
    clock.now += 64.0
    first_batch, seconds = 3.0, {"set-up": 1.0, "training": 17.0, "evaluation": 32.0, "checkpoint": 8.0}
    assert timed.phases(first_batch) == seconds | {"start-up": 5.0, FILE_MAKING: 5.0, "the rest": 64.0}
    assert sum(timed.phases().values()) == clock.now - 100.0
    assert seen[:2] == [("set-up", 100.0, 101.0), ("start-up", 101.0, 108.0)]
