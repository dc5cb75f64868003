import pytest
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from PIL import Image

from extras.benchmarks import photographs
from training.config import ROOT
from training.launch import Extras


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(photographs, "COUNTS", {"train": 2, "val": 1})


def files_of(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*.jpg")}


def test_photographs_are_as_large_as_real_ones_no_two_are_the_same_and_each_time_the_same(tmp_path):
    made = photographs.Photographs(train=True, root=tmp_path / "first", image_size=32)
    assert (len(made), len(made.classes), made[0]["image"].shape) == (20, 10, (32, 32, 3))
    photographs.make(tmp_path / "again")
    files = files_of(tmp_path / "first")
    assert files_of(tmp_path / "again") == files
    assert len(set(files.values())) == 30
    assert all(50_000 < len(data) < photographs.BYTES for data in files.values())
    assert all(Image.open(tmp_path / "first" / name).size == (500, 375) for name in files)


def test_the_data_bound_experiment_changes_the_data_and_leaves_the_loader_to_the_command_line():
    Plugins.instance().register(Extras)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        chosen = compose("config", ["experiment=data_bound", "loader=torch"])
    assert chosen.data["_target_"] == "extras.benchmarks.photographs.Photographs" and chosen.loader.name == "torch"
