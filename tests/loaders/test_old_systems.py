"""Linux without memfd_create or pidfd_open: an old Python or kernel, or a filter, changes no batch."""

import errno
import json
import os
import select
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import ctypes, json, os, platform, signal, struct, sys

CALLS = {"memfd_create": {"x86_64": 319, "aarch64": 279}, "pidfd_open": {"x86_64": 434, "aarch64": 434}}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

def refuse(names, error):
    "Makes the system calls fail with `error` in this process and its children, as a container's filter does."
    machine = platform.machine()
    program = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, 0)]
    for name in names:
        program += [(JUMP_IF_EQUAL, 0, 1, CALLS[name][machine]), (RETURN, 0, 0, ERRNO | error)]
    program += [(RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        print(json.dumps(f"no filter can be installed here: {os.strerror(ctypes.get_errno())}"))
        sys.exit()

names, error = sys.argv[1].split(","), int(sys.argv[2])
if error:
    refuse(names, error)
else:
    for name in names:
        delattr(os, name)

sys.path.insert(0, "tests/loaders")
from example_datasets import Noisy, Written, contents
from loaders import WorkerLoader

def epoch(dataset, num_workers, **settings):
    "An epoch in which a worker is killed, another that is broken off, and one undisturbed."
    with WorkerLoader(dataset, 4, num_workers=num_workers, **settings) as loader:
        batches = iter(loader)
        seen = [next(batches)]
        if num_workers:
            os.kill(batches._workers[0].pid, signal.SIGKILL)
        seen += batches
        next(iter(loader))
        seen += list(loader)
        return contents(seen)

seeded = {"seed": 0, "shuffle": True, "persistent_workers": True}
outcome = {
    "plain": epoch(Noisy(120), 2, **seeded) == epoch(Noisy(120), 0, **seeded),
    "read_batch": epoch(Written(120), 2, **seeded) == epoch(Written(120), 0, **seeded),
    "unseeded": [batch["index"] for batch in epoch(Noisy(120), 2)]
    == [list(range(start, start + 4)) for start in range(0, 120, 4)] * 2,
}
loader = WorkerLoader(Noisy(120), 4, num_workers=2, **seeded)
batches = iter(loader)
next(batches)
print(json.dumps([outcome, [worker.pid for worker in batches._workers]]), flush=True)
sys.stdin.read()  # until it is killed
"""

LACKING = [
    ("memfd_create", errno.EPERM),
    ("pidfd_open", errno.ENOSYS),
    ("memfd_create,pidfd_open", 0),  # Python itself lacks them
]


@pytest.fixture(scope="module")
def programs(python, tmp_path_factory):
    """Programs that lack some calls, all started at once, each with a folder of its own for temporary files."""
    programs = {}
    for names, error in LACKING:
        folder = tmp_path_factory.mktemp("temporary")
        environment = {**os.environ, "TMPDIR": str(folder)}
        program = python.start("-c", PROGRAM, names, error, env=environment, stdin=subprocess.PIPE)
        programs[names, error] = program, folder
    yield programs
    for program, _ in programs.values():
        program.kill()
        program.communicate()


@pytest.mark.parametrize(
    ("names", "error"), LACKING, ids=[f"{names}-{errno.errorcode.get(error, 'missing')}" for names, error in LACKING]
)
def test_a_system_without_memfd_or_pidfd_gets_the_same_batches_and_leaves_nothing_behind(
    names, error, programs, bound
):
    program, folder = programs[names, error]
    if not (line := program.stdout.readline()):
        pytest.fail(program.communicate()[1])
    outcome = json.loads(line)
    if isinstance(outcome, str):
        pytest.skip(outcome)
    same, workers = outcome
    assert same == {"plain": True, "read_batch": True, "unseeded": True}
    pidfds = [os.pidfd_open(pid) for pid in workers]
    program.kill()
    for fd in pidfds:
        assert select.select([fd], [], [], bound)[0], "a worker has outlived its parent"
        os.close(fd)
    assert not list(folder.iterdir())


WINDOWS = """
import ctypes, logging, os, signal, socket, sys
import torch, torch.utils.data, numpy

sys.platform = "win32"
for name in ("register_at_fork", "memfd_create", "pread", "sched_getaffinity"):
    delattr(os, name)
del signal.pthread_sigmask, socket.AF_UNIX

def refuse(*_, **__):
    raise OSError("there is no C library of that name")

ctypes.CDLL = refuse
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from loaders import Preloader, WorkerLoader

for settings in ({"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}, {"num_workers": 0}):
    with Preloader(WorkerLoader(range(8), 4, seed=0, **settings), "cpu", 2) as loader:
        print([batch.tolist() for batch in loader])
"""


def test_on_another_system_the_loaders_read_inline_or_in_threads_and_say_so(python, bound):
    done = python.run("-c", WINDOWS, timeout=bound, check=True)
    assert done.stdout.count("[[0, 1, 2, 3], [4, 5, 6, 7]]") == 3
    assert done.stdout.count("worker processes need Linux") == 1
