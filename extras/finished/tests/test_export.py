"""scripts/export.py: the exported network computes what the original does, and its folder says how to use it."""

import json

import pytest
import torch
from torch import nn

from scripts import export
from training.config import ConfigError
from training.finished import export as exporting
from training.finished.finished_run import FinishedRun

HERE = "loader.num_workers=0"


def test_the_program_takes_batches_of_any_size_and_its_folder_says_how_to_use_it(trained, tmp_path, capsys):
    export.main([str(trained), HERE, "--out", str(tmp_path)])
    assert "on 16 test images its outputs differ by up to " in capsys.readouterr().out
    program = torch.export.load(tmp_path / "model.pt2").module()
    network = FinishedRun(trained, [HERE, "device=cpu"])
    for size in (1, 3, 40):
        images = torch.randn(size, 3, 8, 8)
        assert torch.allclose(program(images), network.outputs({"image": images}), atol=1e-5)
    about = json.loads((tmp_path / "preprocessing.json").read_text())
    assert (about["shape"], about["mean"], about["classes"][-1]) == ([8, 8, 3], [0.5] * 3, "class 5")
    readme = (tmp_path / "README.md").read_text()
    parts = ["model.pt2", "synthetic.Synthetic.prepare", "def prepare(self", "[0.2, 0.2, 0.2]", "RGB", "(8, 8, 3)"]
    assert all(part in readme for part in [*parts, "class 5"]) and "onnx" not in readme


def test_onnx_computes_the_same_and_joins_the_readme(trained, tmp_path, capsys):
    for package in exporting.PACKAGES:
        pytest.importorskip(package)
    export.main([str(trained), HERE, "--format", "onnx", "--out", str(tmp_path)])
    assert (tmp_path / "model.onnx").exists() and "model.onnx" in (tmp_path / "README.md").read_text()


def test_without_onnx_a_sentence_has_the_command(trained, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ConfigError, match=r"needs onnxscript: pip install onnxscript"):
        export.main([str(trained), "--format", "onnx"])


def test_a_file_in_place_of_a_folder_is_refused_with_the_options_that_work(trained):
    with pytest.raises(ConfigError, match=r"^--out a/m\.onnx: give a folder, .*: --format onnx --out a/m$"):
        export.main([str(trained), "--out", "a/m.onnx"])


def test_other_outputs_are_refused_and_leave_no_file(tmp_path, monkeypatch):
    def write(model, images, path):
        path.touch()
        return lambda images: model(images) + 0.1

    monkeypatch.setitem(exporting.FORMATS, "torch", ("model.pt2", write))
    for value, sentence in ((1.0, r"differ by up to 0\.1, and are up to 1;"), (float("nan"), "up to nan")):
        with pytest.raises(ConfigError, match=sentence):
            exporting.export(nn.Flatten(), torch.full((2, 1, 1, 1), value), tmp_path, "torch", 1e-3)
        assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_be_exported_ends_in_a_sentence(tmp_path):
    class Sums(nn.Module):
        def forward(self, images):
            return images if images.sum().item() > 0 else -images

    with pytest.raises(ConfigError, match=r"Sums cannot be exported with --format torch: "):
        exporting.export(Sums(), torch.ones(2, 1, 1, 1), tmp_path, "torch", 1e-3)
    with pytest.raises(NotImplementedError, match="forward"):  # export.py makes a sentence of it
        exporting.export(nn.Module(), torch.ones(2, 1, 1, 1), tmp_path / "none", "torch", 1e-3)
    assert not (tmp_path / "none").exists()
