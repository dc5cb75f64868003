"""Background threads use one core each, and what runs is stopped before the interpreter exits."""

import multiprocessing
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from loaders import background
from loaders.background import EXIT_SECONDS, default_context, start_thread, stop_at_exit


class Running:
    def __init__(self) -> None:
        self.deadlines: list[float] = []

    def stop(self, deadline: float) -> None:
        self.deadlines.append(deadline)


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_a_thread_uses_one_core_and_the_caller_as_many_as_before(four_threads):
    seen = []
    thread = start_thread("a name", lambda *given: seen.append((torch.get_num_threads(), given)), 1, "b")
    thread.join()
    assert seen == [(1, (1, "b"))]
    assert torch.get_num_threads() == 4
    assert (thread.name, thread.daemon) == ("a name", True)


def test_at_exit_all_that_still_exists_is_stopped_by_one_deadline(monkeypatch):
    items, dropped = [Running(), Running()], Running()
    deadlines = dropped.deadlines
    for item in (*items, dropped):
        stop_at_exit(item)
    del item, dropped
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    background._stop_all()
    assert [item.deadlines for item in items] == [[1000.0 + EXIT_SECONDS]] * 2
    assert deadlines == []


def test_a_forked_child_stops_nothing_of_its_parents(monkeypatch):
    item, worker, other = Running(), threading.Event(), threading.Event()
    monkeypatch.setattr(multiprocessing.process, "_children", {worker, other})
    stop_at_exit(item)
    background.protect_from_children(worker)
    child = os.fork()
    if child == 0:
        background._stop_all()
        os._exit(item.deadlines != [] or multiprocessing.process._children != {other})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    background._workers.discard(worker)


@pytest.mark.parametrize(
    ("chosen", "platform", "method"), [(None, "linux", "fork"), (None, "darwin", "spawn"), ("spawn", "linux", "spawn")]
)
def test_workers_are_forked_on_linux_unless_the_program_chose_otherwise(chosen, platform, method, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: chosen if allow_none else "fork")
    monkeypatch.setattr(background, "sys", SimpleNamespace(platform=platform))
    assert default_context().get_start_method() == method
