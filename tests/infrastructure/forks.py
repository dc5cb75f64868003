"""Copies of the repository with files of a fork in them, and programs that run there."""

import os
import re
import shutil
from pathlib import Path

from tests.infrastructure.python_server import PythonServer

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".*", "__pycache__", "outputs", "multirun", "downloads")
OURS = "# A PyTorch training template that keeps your accelerator fed"
IS_OURS = (ROOT / "README.md").read_text().startswith(OURS)
PYTEST = ("-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))")


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def snippets(*pages: Path) -> dict[str, str]:
    """The code blocks that are files of a fork, by their paths. They begin with the line `# PATH`."""
    texts = [text for page in pages for kind in ("python", "yaml") for text in blocks(page, kind)]
    matches = [(re.match(r"(?:# @package \S+\n)?# (\S+\.(?:py|yaml))\n", text), text) for text in texts]
    return {match[1]: text for match, text in matches if match}


def copy(folder: Path, without: str = "", files: dict[str, str] | None = None) -> Path:
    """A copy of the repository without some paths, as in "extras/report scripts", with more files."""
    ignored = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True, symlinks=True)
    for name in without.split():
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def call(python: PythonServer, folder: Path, *lines: list[str]) -> None:
    """Runs programs one after the other. The first that fails fails the test."""
    environment = {**os.environ, "PYTHONPATH": "", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    for line in lines:
        done = python.run(*line, cwd=folder, env=environment, timeout=600)
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
