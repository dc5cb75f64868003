"""Every part of the table in README.md, "Removing what you don't need", can be deleted, and the rest still works."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["data=synthetic", "data.length=64", "data.test_length=16", "data.image_size=8", "model=linear"]
SHORT = ["train.batch_size=16", "train.epochs=1", "loader=workers", "loader.num_workers=1"]
SECTION = r"## Removing what you don't need\n(.*?)\n## "


def parts() -> dict[str, list[str]]:
    """The files and folders of each part in the table that has not been deleted."""
    section = re.search(SECTION, (ROOT / "README.md").read_text(), re.DOTALL)
    rows = [line.split("|")[1:-1] for line in section[1].splitlines() if line.startswith("| ")]
    named = [pair for names, paths in rows for pair in zip(names.split(";"), paths.split(";"), strict=True)]
    found = {name.strip(): re.findall(r"`([^`]+)`", paths) for name, paths in named if "`" in paths}
    return {name: paths for name, paths in found.items() if any(any(ROOT.glob(path)) for path in paths)}


PARTS = parts()


def copy_without(folder: Path, names: list[str]) -> Path:
    """Copies the repository into `folder`, without the parts."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "outputs", "multirun", "downloads")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    for path in (path for name in names for path in PARTS[name]):
        matches = list(folder.glob(path))
        assert matches, f"{path} in README.md does not exist"
        for match in matches:
            shutil.rmtree(match) if match.is_dir() else match.unlink()
    return folder


def call(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": "", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.skipif(not PARTS, reason="a fork has deleted them all")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("removed", ["all", *(pytest.param(name, marks=pytest.mark.slow) for name in PARTS)])
def test_a_part_can_be_deleted_and_so_can_all_at_once(tmp_path, removed):
    names = list(PARTS) if removed == "all" else [removed]
    left = PARTS.keys() - set(names)
    folder = copy_without(tmp_path, names)
    call(folder, "train.py", *SMALL, *SHORT, "hydra.run.dir=run")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert ("verdict" in summary) == ("report and verdict" in left)
    call(folder, "train.py", "-m", "seed=0,1", *SMALL, *SHORT, "hydra.sweep.dir=sweep")
    assert (folder / "sweep" / "sweep.md").exists() == ("sweep table and picture" in left)
    # All tests are collected; those run that use most parts.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not slow"]
    call(folder, "-m", "pytest", *options, "-k", "test_train.py or test_config.py", "tests")


def test_the_core_imports_none_of_the_parts():
    outer = [path.removesuffix(".py").strip("/").replace("/", ".") for paths in PARTS.values() for path in paths]
    outer = [name for name in outer if name.startswith(("training.", "data.", "models."))]
    files = [ROOT / "train.py", *(ROOT / "training").glob("*.py"), *(ROOT / "models").glob("*.py")]
    for file in files:
        imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", file.read_text(), re.MULTILINE)
        wrong = [name for name in imported for part in outer if f"{name}.".startswith(f"{part}.")]
        own = str(file.relative_to(ROOT)).removesuffix(".py").replace("/", ".")
        assert own in outer or not wrong, f"{file} imports {wrong}"
