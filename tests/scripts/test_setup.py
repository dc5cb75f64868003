"""scripts/train and scripts/test: what they install, when they install it, and what they say if they cannot.

Python and uv are shell scripts here. They answer what scripts/environment.sh asks, "make" a .venv by copying the
Python into it, and log each install. PATH has nothing else but the few tools that the scripts need.
"""

import re
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
"-m pip "*) echo pip >> "$LOG"; exit ${{INSTALL_FAILS:-0}} ;;
*) echo "$PWD: $*" ;;
esac
"""
INSTALLED = f'#!/bin/sh\ncase "$1" in *.py) ;; *) exec {sys.executable} "$@" ;; esac\n'
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

    def __init__(self, folder):
        self.root = folder / "my fork"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.venv = self.root / ".venv"
        self.requirements = self.root / "requirements.txt"
        shutil.copytree(SCRIPTS, self.root / "scripts")
        self.requirements.write_text("torch")
        self.log.touch()
        self.bin.mkdir()
        for tool in filter(shutil.which, TOOLS):
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.add_python("python3", "3.12")

    def add_python(self, name, version, no_venv=0):
        write_script(self.bin / name, PYTHON.format(version=version, no_venv=no_venv))

    def start(self, script="train", *arguments, **env):
        env = {"PATH": str(self.bin), "BIN": str(self.bin), "LOG": str(self.log), "VENV_GB": "0", **env}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
        return subprocess.Popen([self.root / "scripts" / script, *arguments], cwd=self.root.parent, **options)

    def says(self, *arguments, status=0, **env):
        """What a run printed to standard error."""
        process = self.start(*arguments, **env)
        err = process.communicate(timeout=30)[1]
        assert process.returncode == status, err
        return err

    def installs(self):
        """The program that made each install."""
        return self.log.read_text().split()


def write_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def fork(tmp_path):
    return Fork(tmp_path)


def test_train_runs_where_the_caller_is_and_test_in_the_root(fork, tmp_path):
    trained, tested = (fork.start(name, "a b", "c=1").communicate()[0] for name in ("train", "test"))
    assert trained == f"{tmp_path}: {fork.root}/train.py a b c=1\n"
    assert tested.startswith(f"{fork.root}: -m pytest ") and tested.endswith(" a b c=1\n")


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


def test_PYTHON_chooses_the_interpreter_and_an_old_python3_gives_way_to_a_newer_one(fork):
    fork.add_python("python3.11", "3.11")
    ready = fork.venv / "ready"
    assert "with python3.11:" in fork.says(PYTHON="python3.11") and "3.11" in ready.read_text()
    assert fork.says() == ""
    assert "Making .venv with python3:" in fork.says(PYTHON="python3") and "3.12" in ready.read_text()
    fork.add_python("python3", "3.9")
    ready.write_text("made for another folder")
    assert "with python3.11:" in fork.says()


def test_a_python_newer_than_the_tested_ones_is_tried_and_those_are_named_first(fork):
    fork.add_python("python3", "3.99")
    said = fork.says(status=1, INSTALL_FAILS="1")
    assert re.search(
        r"Python 3\.10 to (3\.\d\d), and this is 3\.99: .* PYTHON=python\1 (.|\n)* could not be installed", said
    )


@pytest.mark.parametrize("missing", ["my fork", "my fork/.venv/bin/python"])
def test_a_venv_that_was_moved_or_whose_python_is_gone_is_made_again_without_the_old_files(fork, missing):
    fork.says()
    (fork.venv / "old").touch()
    (fork.root.parent / missing).rename(fork.root.parent / "moved")
    fork.root = fork.root if fork.root.exists() else fork.root.parent / "moved"
    assert "Making .venv" in fork.says()
    assert fork.says() == "" and not (fork.root / ".venv" / "old").exists()


@pytest.mark.parametrize(
    ("python", "options", "sentence"),
    [
        (("3.8",), {}, "Python 3.10 or newer is needed, and python3 is 3.8:"),
        (("3.12",), {"PYTHON": "python3.99"}, "and python3.99 is missing: install one"),
        (("3.12", 1), {}, "apt install python3.12-venv"),
        (("3.12",), {"VENV_GB": "999999"}, "GB free, and making .venv takes 999999 GB: make room"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_installed(fork, python, options, sentence):
    fork.add_python("python3", *python)
    assert sentence in fork.says(status=1, **options) and fork.installs() == []


@pytest.mark.parametrize(
    ("python", "required", "options", "sentence"),
    [
        (INSTALLED, "# a\n\nb>=1; platform_system == 'Nowhere'\npytest>=1,<1000  # why", {}, ""),
        (INSTALLED, "pytest\nno-such-package>=2  # why", {}, "lacks no-such-package>=2 (it has none). "),
        (INSTALLED, "pytest<1", {}, f"lacks pytest<1 (it has {pytest.__version__}). "),
        (INSTALLED, "", {"PYTHON": "python3.99"}, ", and PYTHON=python3.99 asks for another. "),
        (PYTHON.format(version="3.8", no_venv=0), "", {}, "has Python 3.8, and 3.10 or newer is needed. "),
        ("#!/nowhere", "", {}, "has no bin/python that runs. "),
    ],
)
def test_a_venv_of_the_users_own_is_used_if_it_fits_and_is_left_as_it_is(fork, python, required, options, sentence):
    write_script(fork.venv / "bin" / "python", python)
    fork.requirements.write_text(required)
    said = fork.says(status=bool(sentence), **options)
    assert sentence in said and said.endswith("or move it away to have a new one made.\n" * bool(sentence))
    assert bool(said) == bool(sentence) and fork.installs() == []
    assert [path.name for path in fork.venv.iterdir()] == ["bin"]
