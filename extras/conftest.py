"""Gives the tests of each extra what tests/conftest.py gives those of the core, and Hydra the extras' settings."""

from hydra.core.plugins import Plugins

from tests.conftest import bound, nothing_left_behind, pytest_collection_modifyitems, pytest_configure, python

__all__ = ["bound", "nothing_left_behind", "pytest_collection_modifyitems", "pytest_configure", "python"]


def pytest_collection_finish() -> None:
    from training.launch import Extras  # not before: it imports torch, see tests/conftest.py

    Plugins.instance().register(Extras)
