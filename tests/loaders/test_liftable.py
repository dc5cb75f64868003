"""The folder loaders/ serves any project: copied under another name into another package, it needs nothing of ours."""

import shutil
from pathlib import Path

import pytest

import loaders

PROGRAM = """
import sys
from project.reading.input import Preloader, WorkerLoader

for settings in ({"num_workers": 0}, {"num_workers": 2}):
    with Preloader(WorkerLoader(range(8), 4, seed=3, **settings), "cpu", 2) as loader:
        print([batch.tolist() for batch in loader])
ours = [name for name in sys.modules if name.split(".")[0] in ("loaders", "data", "models", "training", "train")]
assert not ours, ours
"""


def test_a_copy_under_another_name_reads_and_preloads(python, tmp_path, bound):
    package = tmp_path / "project"
    shutil.copytree(
        Path(loaders.__file__).parent, package / "reading" / "input", ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in (package, package / "reading"):
        (folder / "__init__.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = python.run(tmp_path / "program.py", cwd=tmp_path, env=environment, timeout=3 * bound)
    assert (done.returncode, done.stdout) == (0, 2 * "[[0, 1, 2, 3], [4, 5, 6, 7]]\n"), done.stderr


def test_pip_installs_every_package_of_the_loaders_and_nothing_else():
    tomllib = pytest.importorskip("tomllib")
    folder = Path(loaders.__file__).parent
    settings = tomllib.loads((folder.parent / "pyproject.toml").read_text())
    (name,) = settings["tool"]["setuptools"]["package-dir"]
    parts = sorted(".".join((name, *file.parent.relative_to(folder).parts)) for file in folder.rglob("__init__.py"))
    assert settings["tool"]["setuptools"]["packages"] == parts
    needed = {text.partition(">")[0] for text in settings["project"]["dependencies"]}
    assert (name, needed) == (settings["project"]["name"], {"numpy", "torch"})
