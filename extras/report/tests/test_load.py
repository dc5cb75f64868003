"""How much of the machine other programs use, on a machine with made-up clocks."""

from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from training.callbacks.report import load as module
from training.callbacks.report.load import Load

Core = namedtuple("Core", "user idle iowait")
Own = namedtuple("Own", "user system children_user children_system")


@pytest.fixture
def machine(monkeypatch):
    """Two cores that this process may use and two that it may not; `pass_time` lets ten seconds pass."""
    state = SimpleNamespace(clock=0.0, idle=0.0, own=0.0, child=0.0)
    child = SimpleNamespace(cpu_times=lambda: Own(state.child, 0.0, 0.0, 0.0))
    gone = SimpleNamespace(cpu_times=lambda: (_ for _ in ()).throw(psutil.NoSuchProcess(1)))
    this = SimpleNamespace(cpu_times=lambda: Own(state.own, 0.0, 0.0, 0.0), children=lambda recursive: [child, gone])
    monkeypatch.setattr(module.psutil, "Process", lambda: this)
    monkeypatch.setattr(
        module.psutil, "cpu_times", lambda percpu: [Core(0.0, state.idle / 2, 0.0)] * 2 + [Core(0, 0, 0)] * 2
    )
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    monkeypatch.setattr(module.time, "monotonic", lambda: state.clock)

    def pass_time(idle: float, own: float, child: float = 0.0, seconds: float = 10.0) -> None:
        state.clock, state.idle, state.own, state.child = seconds, idle, own, child

    return pass_time


@pytest.mark.parametrize(
    ("idle", "own", "child", "others"),
    [
        (0.0, 12.0, 8.0, 0.0),  # this process and its worker compute
        (0.0, 10.0, 0.0, 0.5),  # another program takes the second core
        (4.0, 8.0, 2.0, 0.3),
        (0.0, 20.4, 0.0, 0.0),  # clocks are not exact
    ],
)
def test_what_is_neither_idle_nor_used_by_this_process_and_its_workers_is_used_by_others(
    machine, idle, own, child, others
):
    load = Load()
    machine(0.0, 0.0, seconds=0.01)
    assert load.of_others() == 0.0, "a moment is too short to tell"
    machine(idle, own, child)
    assert load.of_others() == pytest.approx(others)
