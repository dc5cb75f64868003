"""A Preloader that is closed after the test, a loader that blocks, and the threads of preloaders."""

import threading

import pytest
import torch

import loaders.preload.engine
from loaders import Preloader


class Blocking:
    """Its second batch does not come before `release` is set, which its own close() does."""

    def __init__(self):
        self.reached = threading.Event()
        self.release = threading.Event()
        self.closed = False

    def __iter__(self):
        yield torch.tensor([0])
        self.reached.set()
        assert self.release.wait(60)
        yield torch.tensor([1])

    def close(self):
        self.closed = True
        self.release.set()


@pytest.fixture
def make(closed_later):
    def make(loader, depth=2, device="cpu", transform=None):
        return closed_later(Preloader(loader, device, depth, transform))

    return make


@pytest.fixture
def blocking():
    source = Blocking()
    yield source
    source.release.set()


@pytest.fixture
def impatient(monkeypatch):
    """The end of an epoch does not wait long for a thread that does not come back."""
    monkeypatch.setattr(loaders.preload.engine, "JOIN_SECONDS", 0.05)
    monkeypatch.setattr(loaders.preload.engine, "GIVE_UP_SECONDS", 0.05)


@pytest.fixture
def preloading():
    """The preloaders' threads that the test has running."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread.name == "preloader" and thread not in before]
