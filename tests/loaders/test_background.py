"""Background threads use one core each, and what runs is stopped before the interpreter exits."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from loaders import background
from loaders.background import default_context, start_thread


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


@pytest.mark.parametrize(
    ("chosen", "platform", "method"), [(None, "linux", "fork"), (None, "darwin", "spawn"), ("spawn", "linux", "spawn")]
)
def test_workers_are_forked_on_linux_unless_the_program_chose_otherwise(chosen, platform, method, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: chosen if allow_none else "fork")
    monkeypatch.setattr(background, "sys", SimpleNamespace(platform=platform))
    assert default_context().get_start_method() == method
