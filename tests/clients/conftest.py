"""Real clients in place of a test's own loop. Nothing needs a network, and a missing package skips its tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT_SECONDS = 250.0  # only ever spent by a script that hangs
PATHS = f"{Path(__file__).parents[2]}{os.pathsep}{Path(__file__).parent}"


@pytest.fixture(autouse=True)
def check_what_is_left(monkeypatch, nothing_left_behind):
    """Runs that check after every test of this folder."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # or a client's progress bar starts a thread, for ever


@pytest.fixture
def script(tmp_path: Path):
    """Runs the source of a script, as its own program, in `tmp_path`, and returns what it printed."""

    def run(source: str, status: int = 0) -> str:
        file, printed = tmp_path / "script.py", tmp_path / "printed"
        file.write_text(source)
        with printed.open("w") as out:  # a pipe would stay open as long as a process that the script has started
            options = {"cwd": tmp_path, "stdout": out, "stderr": subprocess.STDOUT, "timeout": SCRIPT_SECONDS}
            done = subprocess.run([sys.executable, str(file)], env={**os.environ, "PYTHONPATH": PATHS}, **options)
        assert done.returncode == status, printed.read_text()
        return printed.read_text()

    return run
