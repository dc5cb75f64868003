from functools import partial
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from PIL import Image

from extras.benchmarks import photographs
from tests.data.contract import ImageDataset
from training.config import ROOT
from training.launch import Extras


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(photographs, "COUNTS", {"train": 2, "val": 1})


@pytest.fixture(scope="module")
def few_photographs(tmp_path_factory):
    """Two training photographs and one test photograph of each class."""
    folder = tmp_path_factory.mktemp("data") / "photographs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(photographs, "COUNTS", {"train": 2, "val": 1})
        photographs.make(folder)
    return folder


class TestPhotographs(ImageDataset):
    yaml = Path(__file__).parents[1] / "conf" / "data" / "photographs.yaml"

    @pytest.fixture
    def make(self, few_photographs):
        return partial(photographs.Photographs, root=few_photographs, image_size=32)


def files_of(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*.jpg")}


def test_photographs_are_as_large_as_real_ones_no_two_are_the_same_and_each_time_the_same(few_photographs, tmp_path):
    photographs.make(tmp_path / "again")
    files = files_of(few_photographs)
    assert files_of(tmp_path / "again") == files
    assert len(set(files.values())) == 30
    assert all(50_000 < len(data) < photographs.BYTES for data in files.values())
    assert all(Image.open(few_photographs / name).size == (500, 375) for name in files)
    made = photographs.Photographs(train=True, root=few_photographs)
    assert (len(made), len(made.classes)) == (20, 10)


def test_after_an_interruption_there_is_no_folder_and_the_photographs_are_made_again(tmp_path, monkeypatch):
    root, partial = tmp_path / "photographs", tmp_path / ".photographs.partial"

    def interrupted(folder, count):
        folder.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(photographs, "write_all", interrupted)
        photographs.Photographs(train=True, root=root)
    assert not root.exists() and not partial.exists()
    partial.mkdir()  # as a killed process leaves it
    (partial / "half.jpg").write_bytes(b"half")
    made = photographs.Photographs(train=False, root=root)
    assert len(made) == 10
    assert len(files_of(root)) == 30 and not partial.exists()


def test_the_data_bound_experiment_changes_the_data_and_leaves_the_loader_to_the_command_line():
    Plugins.instance().register(Extras)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        chosen = compose("config", ["experiment=data_bound", "loader=torch"])
    assert chosen.data["_target_"] == "extras.benchmarks.photographs.Photographs" and chosen.loader.name == "torch"
