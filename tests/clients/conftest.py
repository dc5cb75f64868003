"""Real clients in place of a test's own loop. Nothing needs a network, and a missing package skips its tests."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT_SECONDS = 100.0  # only ever spent by a script that hangs


@pytest.fixture(autouse=True)
def check_what_is_left(monkeypatch, nothing_left_behind):
    """Runs that check after every test of this folder."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # or a client's progress bar starts a thread, for ever


@pytest.fixture
def script(tmp_path: Path):
    """Runs the source of a script, as its own program, in `tmp_path`, and returns what it printed.

    Fails if the script does not exit by itself, or exits with another status than `status`.
    """

    def run(source: str, status: int = 0) -> str:
        file = tmp_path / "script.py"
        file.write_text(source)
        paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        process = subprocess.Popen(
            [sys.executable, str(file)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=SCRIPT_SECONDS)
        except subprocess.TimeoutExpired as hanging:
            pytest.fail(f"the script did not exit by itself; it printed:\n{(hanging.output or b'').decode()}")
        finally:  # the test's own time may be over, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        assert process.returncode == status, printed
        return printed

    return run
