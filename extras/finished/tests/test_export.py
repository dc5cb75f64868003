"""export.py: the exported network computes what the original does, and its folder says how to use it."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from extras.finished import export
from extras.finished.finished_run import FinishedRun
from tests.configs import train
from training.config import ConfigError

DOORS = "finished_doors"
TABLE = [f"data._target_={DOORS}.Table", "task=regression", "task.inputs=[left,right]", "task.label=y"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(folder, "model=linear", "data.num_classes=6", "data.test_length=20")
    return folder


def code_of(folder):
    """The program in README.md."""
    return (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


@pytest.mark.timeout(300)
def test_the_program_in_the_readme_runs_without_the_repository(trained, tmp_path):
    export.main([str(trained), "--out", str(tmp_path)])
    code = code_of(tmp_path) + "\nprint(abs(outputs - torch.from_numpy(example['outputs'])).max().item())"
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    assert float(done.stdout) < 1e-5
    readme = (tmp_path / "README.md").read_text()
    assert all(part in readme for part in ("[0.5, 0.5, 0.5]", "[0.2, 0.2, 0.2]", "`image`: float32", "class 5"))


def test_batches_of_any_size_give_the_networks_outputs(trained, tmp_path):
    program = torch.export.load(export.main([str(trained), "--out", str(tmp_path)])).module()
    network = FinishedRun(trained)
    for size in (1, 3, 40):
        images = torch.randn(size, 3, 8, 8)
        assert torch.allclose(program(images), network.outputs({"image": images}), atol=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_a_tables_network_of_two_inputs_is_exported(tmp_path, form):
    for package in export.PACKAGES if form == "onnx" else ():
        pytest.importorskip(package)
    train(tmp_path / "run", *TABLE, f"model._target_={DOORS}.MLP")
    path = export.main([str(tmp_path / "run"), "--format", form])
    example = np.load(path.parent / "example.npz")
    found = export.load(path)(tuple(torch.from_numpy(example[name][:5]) for name in ("left", "right")))
    assert torch.allclose(found[0], torch.from_numpy(example["outputs"][:5]), atol=1e-5)
    assert (
        path.name in code_of(path.parent) and "`right`: float32 (batch, 3)" in (path.parent / "README.md").read_text()
    )


def test_other_outputs_are_refused_and_leave_no_file(tmp_path):
    train(tmp_path, *TABLE, f"model._target_={DOORS}.Unlike")
    with pytest.raises(ConfigError, match=r"model\.pt2 computes different outputs: .* differ by up to 1, "):
        export.main([str(tmp_path)])
    assert not (tmp_path / "export" / "model.pt2").exists()


def test_without_onnx_a_sentence_has_the_command(trained, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ConfigError, match=r"needs onnxscript: pip install onnxscript"):
        export.main([str(trained), "--format", "onnx"])
