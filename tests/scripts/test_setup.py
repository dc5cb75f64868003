"""scripts/train and scripts/test with a stand-in for Python: what they install, when, or say if they cannot.

The stand-in is a shell script: it answers what scripts/environment.sh asks, "makes" a .venv by copying itself
there, and writes down each install. PATH holds nothing else but the few tools the scripts need.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOOLS = ("sh", "awk", "cat", "cksum", "cp", "df", "dirname", "flock", "head", "mkdir", "rm", "sed")
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) echo {version} ;;
*ensurepip*) exit {no_venv} ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip "*) echo installed >> "$LOG"; [ -z "$HOLD" ] || cat "$HOLD"; exit ${{PIP_FAILS:-0}} ;;
*) echo "$PWD: $*" ;;
esac
"""


class Fork:
    """A copy of the scripts in a folder with a space in its name, and a PATH with a stand-in for python3."""

    def __init__(self, folder: Path):
        self.root = folder / "my fork"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.ready = self.root / ".venv" / "ready"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("train", "test", "environment.sh"):
            shutil.copy(SCRIPTS / name, self.root / "scripts")
        self.require("torch")
        self.bin.mkdir()
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.add_python("python3", "3.12")

    def require(self, text: str) -> None:
        (self.root / "requirements.txt").write_text(text)

    def add_python(self, name: str, version: str, no_venv: int = 0) -> None:
        (self.bin / name).write_text(PYTHON.format(version=version, no_venv=no_venv))
        (self.bin / name).chmod(0o755)

    def start(self, script: str = "train", *arguments: str, cwd: Path | None = None, **env: str) -> subprocess.Popen:
        env = {"PATH": str(self.bin), "LOG": str(self.log), "VENV_GB": "0", **env}
        command = [self.root / "scripts" / script, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd or self.root, env=env)

    def run(self, *arguments, **options) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def installs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def sentence(self, **options) -> str:
        """The last line that a run which must fail leaves on standard error."""
        result = self.run(**options)
        assert result.returncode == 1
        assert result.stdout == ""
        assert not self.ready.exists()
        return result.stderr.splitlines()[-1]


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    return Fork(tmp_path)


def test_train_runs_where_the_caller_is_and_test_in_the_root(fork: Fork, tmp_path: Path):
    assert fork.run("train", "a b", "c=1", cwd=tmp_path).stdout == f"{tmp_path}: {fork.root}/train.py a b c=1\n"
    assert fork.run("test", "-k", "x y", cwd=tmp_path).stdout == f"{fork.root}: -m pytest -k x y\n"


def test_installs_once_and_is_silent_afterwards(fork: Fork):
    assert "6 GB" in fork.run().stderr
    assert fork.run().stderr == ""
    assert fork.run("test").stderr == ""
    assert fork.installs() == 1


def test_changed_requirements_are_installed_into_the_same_venv(fork: Fork):
    fork.run()
    keepsake = fork.root / ".venv" / "keepsake"
    keepsake.touch()
    fork.require("torch\ntimm")
    assert "requirements.txt has changed" in fork.run().stderr
    assert fork.installs() == 2
    assert keepsake.exists()
    assert fork.run().stderr == ""


def test_a_failed_install_is_repeated(fork: Fork):
    assert fork.sentence(PIP_FAILS="1").startswith("pip could not install requirements.txt")
    assert fork.run().returncode == 0
    assert fork.installs() == 2


def test_a_failed_update_is_repeated_even_when_the_change_is_taken_back(fork: Fork):
    fork.run()
    fork.require("torch<2")
    assert fork.run(PIP_FAILS="1").returncode == 1
    fork.require("torch")
    assert fork.run().returncode == 0
    assert fork.installs() == 3


def test_two_runs_at_once_install_once(fork: Fork, tmp_path: Path):
    if not shutil.which("flock"):
        pytest.skip("needs flock")
    hold = tmp_path / "hold"
    os.mkfifo(hold)
    first = fork.start(HOLD=str(hold))
    with hold.open("w"):  # opens once the first run's pip reads it, and keeps that pip waiting until closed
        second = fork.start()
        assert "waiting" in second.stderr.readline()
    assert [process.wait(timeout=30) for process in (first, second)] == [0, 0]
    assert fork.installs() == 1


def test_a_moved_venv_is_made_anew(fork: Fork, tmp_path: Path):
    fork.run()
    fork.root = fork.root.rename(tmp_path / "moved")
    assert "Making .venv" in fork.run().stderr
    assert fork.run().stderr == ""


def test_a_venv_whose_python_is_gone_is_made_anew(fork: Fork):
    fork.run()
    (fork.root / ".venv" / "bin" / "python").unlink()
    assert "Making .venv" in fork.run().stderr


def test_PYTHON_chooses_the_interpreter_and_changes_it(fork: Fork):
    fork.add_python("python3.11", "3.11")
    fork.run(PYTHON="python3.11")
    assert "3.11" in fork.ready.read_text()
    assert fork.run().stderr == ""
    assert "Making .venv with python3" in fork.run(PYTHON="python3").stderr
    assert "3.12" in fork.ready.read_text()


def test_an_old_python3_gives_way_to_a_newer_one_on_the_path(fork: Fork):
    fork.add_python("python3", "3.9")
    fork.add_python("python3.10", "3.10")
    assert "with python3.10:" in fork.run().stderr


def test_an_old_python_is_named_with_its_version(fork: Fork):
    fork.add_python("python3", "3.8")
    assert fork.sentence().startswith("Python 3.10 or newer is needed, and python3 is 3.8:")


def test_a_missing_python_is_named(fork: Fork):
    assert "and python3.99 is missing: install one" in fork.sentence(PYTHON="python3.99")
    (fork.bin / "python3").unlink()
    assert "and python3 is missing: install one" in fork.sentence()


def test_a_missing_venv_module_is_named_with_its_package(fork: Fork):
    fork.add_python("python3", "3.12", no_venv=1)
    assert "apt install python3.12-venv" in fork.sentence()


def test_a_small_disk_is_refused_before_anything_is_installed(fork: Fork):
    assert "GB free, and making .venv takes 999999 GB: make room" in fork.sentence(VENV_GB="999999")
    assert fork.installs() == 0
