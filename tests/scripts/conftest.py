"""A small run, trained once for the tests of what uses finished runs."""

from pathlib import Path

import pytest
import torch

from tests.configs import NO_TRIALS, composed
from train import run

SMALL = [
    *("data=synthetic", "data.length=256", "data.test_length=40", "data.image_size=8", "data.num_classes=6"),
    *("train.batch_size=16", "train.epochs=1", "loader=torch", "loader.num_workers=0", *NO_TRIALS),
]


@pytest.fixture(autouse=True)
def as_many_threads_as_before():
    """Benches set the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a run on 8x8 images with six classes; tests write elsewhere, with --out."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run(composed(*SMALL), folder)
    return folder
