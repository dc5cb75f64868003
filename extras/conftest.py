"""Gives the tests of each extra what tests/conftest.py gives those of the core."""

from tests.conftest import bound, nothing_left_behind, pytest_collection_modifyitems, pytest_configure, python

__all__ = ["bound", "nothing_left_behind", "pytest_collection_modifyitems", "pytest_configure", "python"]
