"""train.py on machines that lack something: a run ends well there, or one sentence says what is wrong."""

import errno
import logging
import os
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests.configs import FAST, checkpoint, composed, summary_of
from tests.data.reading import refused
from tests.training.test_command_line import program
from training.config import checked
from training.launch import LogFile
from training.processes import STARTERS, Processes
from training.results import Results, sentence_of
from training.script import run_script

SKIPPED = 77
NEW_MOUNTS = 0x20000
NEW_PROCESSES = 0x20000000
PRIVILEGED = f"""
import ctypes
libc = ctypes.CDLL(None)
def mount(kind, folder, options, flags=0):
    os.makedirs(folder, exist_ok=True)
    if libc.mount(b"none", os.fsencode(folder), kind, flags, options):
        sys.exit({SKIPPED})
def unshare(flag):
    if libc.unshare(flag) or (flag == {NEW_MOUNTS} and libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None)):
        sys.exit({SKIPPED})
"""
NO_USER = """
import pwd
def nobody(*_):
    raise KeyError("no such user")
pwd.getpwuid = pwd.getpwnam = nobody
for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
    os.environ.pop(name, None)
"""
FIRST_PROCESS = f"""{PRIVILEGED}
unshare({NEW_PROCESSES})
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert os.getpid() == 1
"""
SMALL_MEMORY = f"""{PRIVILEGED}
unshare({NEW_MOUNTS})
mount(b"tmpfs", "/dev/shm", b"size=8m")
"""
READ_ONLY = f"""{PRIVILEGED}
unshare({NEW_MOUNTS})
mount(b"tmpfs", "ours", b"size=1m", 1)
"""
ASCII = "sys.stdout, sys.stderr = (open(number, 'w', encoding='ascii', closefd=False) for number in (1, 2))"
NO_GIT = "os.environ['PATH'] = ''"
NO_SIGNAL = "import signal; del signal.SIGUSR1, signal.SIGUSR2"
# What a machine lacks does not hide what else it lacks, so that two programs suffice.
MACHINES = {
    "no home, no user, no git, no SIGUSR1, and a terminal that shows ASCII alone": (
        [NO_USER, NO_GIT, NO_SIGNAL, ASCII],
        ["hydra.run.dir='é'"],
    ),
    "8 MB of /dev/shm, as the first process of a container": (
        [SMALL_MEMORY, FIRST_PROCESS],
        ["loader=workers", "loader.num_workers=1"],
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_run_ends_well_on_a_machine_with(python, tmp_path, machine):
    statements, settings = MACHINES[machine]
    done = program(python, tmp_path, "\n".join(statements), *settings)
    if done.returncode == SKIPPED:
        pytest.skip("the kernel does not let this user make such a machine")
    assert done.returncode == 0 and "Logging error" not in done.stderr, done.stdout + done.stderr
    (folder,) = (path.parent for path in tmp_path.glob("*/summary.json"))
    assert checkpoint(folder)["step"] == 2 and summary_of(folder)["epochs"] == 1


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_done(python, tmp_path):
    done = program(python, tmp_path, READ_ONLY, "hydra.run.dir=ours/out")
    if done.returncode == SKIPPED:
        pytest.skip("the kernel does not let this user mount a file system")
    assert done.returncode == 1 and "Read-only file system: 'ours" in done.stderr and "Traceback" not in done.stderr


def test_a_log_that_cannot_be_written_is_said_once(capsys):
    handler = LogFile("/dev/full")
    log = logging.Logger("full")
    log.addHandler(handler)
    for _ in range(3):
        log.info("a line")
    with suppress(OSError):  # the lines are still in the file's buffer
        handler.close()
    said = capsys.readouterr().err
    assert said == "/dev/full cannot be written (No space left on device): make room there\n"


def test_a_folder_without_room_is_named_before_anything_is_done(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("training.results.locked", full)
    with refused(r"run cannot be written .*No space left on device"):
        Results(tmp_path / "run", writes=True)


def test_a_script_shows_letters_that_its_terminal_lacks_as_numbers(tmp_path, monkeypatch):
    with open(tmp_path / "shown", "w", encoding="ascii") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "path", [*sys.path])
        run_script(lambda: print("é"))
    assert (tmp_path / "shown").read_text() == "\\xe9\n"


@pytest.mark.parametrize("name", STARTERS)
def test_processes_of_a_cluster_that_know_nothing_of_each_other_say_so(caplog, monkeypatch, name):
    monkeypatch.setenv(name, "4")
    Processes("cpu", checked(composed(*FAST)).train)
    assert f"{name}=4: each of these programs trains a run of its own" in caplog.text


def test_a_process_without_a_device_of_its_own_is_refused_before_it_waits_for_the_others(monkeypatch):
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    one_device = SimpleNamespace(device_count=lambda: 1)
    monkeypatch.setattr("loaders.accelerator.module_of", lambda device: one_device)
    with refused(r"process 1 of this machine has no device .*'cuda:1'.*; start one process per device"):
        Processes("cuda", checked(composed(*FAST)).train)


def test_the_error_of_a_gpu_that_names_no_label_says_how_to_find_it():
    assert "train with device=cpu" in sentence_of(RuntimeError("CUDA error: device-side assert triggered\nFor ..."))
