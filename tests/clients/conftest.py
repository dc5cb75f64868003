"""Real clients in place of a test's own loop. Nothing needs a network, and a missing package skips its tests."""

import pytest


@pytest.fixture(autouse=True)
def check_what_is_left(monkeypatch, nothing_left_behind):
    """Runs that check after every test of this folder."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # or a client's progress bar starts a thread, for ever
