"""A small run, trained once for the tests of what uses finished runs."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from train import CONF, run

SMALL = [
    *("data=synthetic", "data.length=256", "data.test_length=40", "data.image_size=8", "data.num_classes=6"),
    *("train.batch_size=16", "train.epochs=1", "loader=torch", "loader.num_workers=0", "timing.trial_seconds=0"),
]


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a run on 8x8 images with six classes; tests write elsewhere, with --out."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run(compose("config", overrides=SMALL), folder)
    return folder
