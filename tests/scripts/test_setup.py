"""scripts/train and scripts/test: what they install, when they install it, and what they say if they cannot.

Python and uv are shell scripts here. They answer what scripts/environment.sh asks, "make" a .venv by copying the
Python into it, and log each install. PATH has nothing else but the few tools that the scripts need.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOOLS = ("sh", "awk", "cat", "cksum", "cp", "df", "dirname", "find", "flock", "head", "mkdir", "rm", "sed")
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) echo {version} ;;
*ensurepip*) exit {no_venv} ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit 0 ;;
"-m pip "*) echo pip >> "$LOG"; [ -z "$HOLD" ] || cat "$HOLD"; exit ${{INSTALL_FAILS:-0}} ;;
*Requirement*) exit 0 ;;
*) echo "$PWD: $*" ;;
esac
"""
UV = """#!/bin/sh
case "$*" in
"venv "*" --python python3 "*)
    for folder; do :; done
    mkdir -p "$folder/bin" && cp "$BIN/python3" "$folder/bin/python" ;;
"pip install --python "*) echo uv >> "$LOG"; exit ${INSTALL_FAILS:-0} ;;
*) exit 1 ;;
esac
"""


class Fork:
    """A copy of the scripts in a folder with a space in its name, and a PATH with a fake python3."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.log = folder / "my fork", folder / "bin", folder / "log"
        self.venv, self.requirements = self.root / ".venv", self.root / "requirements.txt"
        shutil.copytree(SCRIPTS, self.root / "scripts")
        self.requirements.write_text("torch")
        self.bin.mkdir()
        for tool in filter(shutil.which, TOOLS):
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.add_python("python3", "3.12")

    def add_python(self, name: str, version: str, no_venv: int = 0) -> None:
        write_script(self.bin / name, PYTHON.format(version=version, no_venv=no_venv))

    def add_users_venv(self, python: str) -> None:
        """A .venv that environment.sh did not make, with a file to find again and this Python, if it is not empty."""
        (self.venv / "bin").mkdir(parents=True)
        (self.venv / "keepsake").touch()
        if python:
            write_script(self.venv / "bin" / "python", python)

    def start(self, script: str = "train", *arguments: str, cwd: Path | None = None, **env: str) -> subprocess.Popen:
        env = {"PATH": str(self.bin), "BIN": str(self.bin), "LOG": str(self.log), "VENV_GB": "0", **env}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
        return subprocess.Popen([self.root / "scripts" / script, *arguments], cwd=cwd or self.root, **options)

    def run(self, *arguments: str, status: int = 0, **options) -> tuple[str, str]:
        """What a run printed to standard output and standard error."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=30)
        assert process.returncode == status, err
        return out, err

    def says(self, *arguments: str, **options) -> str:
        return self.run(*arguments, **options)[1]

    def installs(self) -> list[str]:
        """The program that made each install."""
        return self.log.read_text().split() if self.log.exists() else []


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    return Fork(tmp_path)


def test_train_runs_where_the_caller_is_and_test_in_the_root(fork: Fork, tmp_path: Path):
    assert fork.run("train", "a b", "c=1", cwd=tmp_path)[0] == f"{tmp_path}: {fork.root}/train.py a b c=1\n"
    tested, _ = fork.run("test", "-k", "x y", cwd=tmp_path)
    assert tested.startswith(f"{fork.root}: -m pytest ") and tested.endswith(" -k x y\n")


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_an_install_is_repeated_if_it_failed_or_the_requirements_changed_and_else_nothing_is_said(fork, installer):
    if installer == "uv":  # which needs no venv module
        write_script(fork.bin / "uv", UV)
        fork.add_python("python3", "3.12", no_venv=1)
    assert "could not be installed" in fork.says(INSTALL_FAILS="1", status=1)
    assert "6 GB" in fork.says()
    assert fork.says() == fork.says("test") == ""
    keepsake = fork.venv / "keepsake"
    keepsake.touch()
    fork.requirements.write_text("torch\ntimm")
    assert "requirements.txt has changed" in fork.says()
    assert fork.says() == "" and keepsake.exists()
    assert fork.installs() == [installer] * 3


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock")
def test_two_runs_at_once_install_once(fork: Fork, tmp_path: Path):
    hold = tmp_path / "hold"
    os.mkfifo(hold)
    first = fork.start(HOLD=str(hold))
    with hold.open("w"):  # opens once the first run's pip reads it, and keeps that pip waiting until closed
        second = fork.start()
        assert "waiting" in second.stderr.readline()
    assert [process.wait(timeout=30) for process in (first, second)] == [0, 0]
    assert fork.installs() == ["pip"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("# a comment\n\nwindows-only>=1; platform_system == 'Nowhere'\npytest>=1,<1000  # why", ""),
        ("pytest\nno-such-package>=2  # why", "lacks no-such-package>=2 (it has none). "),
        ("pytest<1", f"lacks pytest<1 (it has {pytest.__version__}). "),
    ],
)
def test_a_venv_of_the_users_own_is_used_if_it_meets_every_requirement_and_is_left_as_it_is(fork, line, reason):
    fork.add_users_venv(f'#!/bin/sh\ncase "$1" in *.py) ;; *) exec {sys.executable} "$@" ;; esac\n')
    fork.requirements.write_text(line)
    said = fork.says(status=bool(reason))
    assert reason in said and bool(reason) == bool(said)
    assert {path.name for path in fork.venv.iterdir()} == {"bin", "keepsake"} and fork.installs() == []


def test_PYTHON_chooses_the_interpreter_and_an_old_python3_gives_way_to_a_newer_one(fork: Fork):
    fork.add_python("python3.11", "3.11")
    ready = fork.venv / "ready"
    assert "with python3.11:" in fork.says(PYTHON="python3.11") and "3.11" in ready.read_text()
    assert fork.says() == ""
    assert "Making .venv with python3:" in fork.says(PYTHON="python3") and "3.12" in ready.read_text()
    fork.add_python("python3", "3.9")
    ready.write_text("made for another folder")
    assert "with python3.11:" in fork.says()


def test_a_venv_that_was_moved_or_whose_python_is_gone_is_made_again_without_the_old_files(fork: Fork, tmp_path: Path):
    fork.run()
    fork.root = fork.root.rename(tmp_path / "moved")
    venv = fork.root / ".venv"
    for missing in ("nothing", "bin/python"):
        (venv / missing).unlink(missing_ok=True)
        (venv / "old").touch()
        assert "Making .venv" in fork.says()
        assert fork.says() == "" and not (venv / "old").exists()


@pytest.mark.parametrize(
    ("python", "venv", "options", "sentence"),
    [
        (("3.8",), None, {}, "Python 3.10 or newer is needed, and python3 is 3.8:"),
        (("3.12",), None, {"PYTHON": "python3.99"}, "and python3.99 is missing: install one"),
        (("3.12", 1), None, {}, "apt install python3.12-venv"),
        (("3.12",), None, {"VENV_GB": "999999"}, "GB free, and making .venv takes 999999 GB: make room"),
        (("3.12",), "3.8", {}, "/my fork/.venv has Python 3.8, and 3.10 or newer is needed. "),
        (("3.12",), "", {}, "/my fork/.venv has no bin/python that runs. "),
        (("3.12",), "3.12", {"PYTHON": "python3.99"}, "has Python 3.12, and PYTHON=python3.99 asks for another. "),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_installed(fork: Fork, python, venv, options, sentence):
    fork.add_python("python3", *python)
    if venv is not None:
        fork.add_users_venv(venv and PYTHON.format(version=venv, no_venv=0))
    said = fork.says(status=1, **options)
    assert sentence in said and fork.installs() == []
    if venv is not None:
        assert said.endswith("or move it away to have a new one made.\n") and (fork.venv / "keepsake").exists()
