"""Gives the tests of each extra what tests/conftest.py gives those of the core, and the settings of the extras."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins

from tests.conftest import bound, nothing_left_behind, pytest_collection_modifyitems, pytest_configure, python
from training.config import ROOT
from training.launch import Extras

__all__ = ["bound", "composed", "nothing_left_behind", "pytest_collection_modifyitems", "pytest_configure", "python"]


@pytest.fixture
def composed():
    """A function that returns the config of train.py with these overrides, which may choose the extras' yaml files."""

    def compose_with_extras(*overrides: str):
        Plugins.instance().register(Extras)
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return compose("config", overrides=list(overrides))

    return compose_with_extras
