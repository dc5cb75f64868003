"""Starts Python programs quickly: a server that has imported torch and Hydra forks itself for each program.

Importing these takes seconds, most of the time of a short program. A program started here differs from a fresh one in
one way: the modules in PRELOADED are imported already, with the server's environment variables. It imports this
repository's modules itself, is its own `__main__`, and exits as any interpreter does.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.process
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import numpy

ROOT = Path(__file__).parents[1]
# The first optimizer imports torch._dynamo.
PRELOADED = ("hydra", "torch", "tqdm", "yaml", "tabulate", "torch._dynamo")
LARGEST_REQUEST = 1 << 17  # bytes


class PythonServer:
    """A server process. `start` and `run` work like subprocess.Popen and subprocess.run with this interpreter."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A new session, so that Ctrl-C in the terminal does not reach the server, which would print a traceback.
            options = {"pass_fds": [theirs.fileno()], "start_new_session": True}
            # Python's own choice of warnings, whatever the user's is: tests look at what programs print.
            options["env"] = {**os.environ, "PYTHONWARNINGS": ""}
            self._process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], **options)

    def start(self, *arguments: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> Program:
        """Starts `python *arguments`: "-c" and a program's text, or a script's path; then the program's arguments."""
        request = [str(argument) for argument in arguments], str(cwd), dict(os.environ) if env is None else env
        stdout, their_stdout = os.pipe()
        status, their_status = os.pipe()
        stderr = os.memfd_create("stderr")  # not a pipe, so that it can be read after stdout
        socket.send_fds(self._control, [json.dumps(request).encode()], [their_stdout, stderr, their_status])
        os.close(their_stdout)
        os.close(their_status)
        return Program(arguments, *map(os.fdopen, (stdout, stderr, status)))

    def run(self, *arguments: object, timeout: float, check: bool = False, **options) -> subprocess.CompletedProcess:
        """Runs a program to its end and captures its output. Raises AssertionError if `check` and it fails."""
        with self.start(*arguments, **options) as program:
            out, err = program.communicate(timeout)
        assert not (check and program.returncode), f"the program exited with {program.returncode}:\n{err}"
        return subprocess.CompletedProcess(arguments, program.returncode, out, err)

    def close(self) -> None:
        self._control.close()
        assert self._process.wait() == 0


class Program:
    """A program that the server has started, with the methods of subprocess.Popen that tests use."""

    def __init__(self, arguments: tuple, stdout: TextIO, stderr: TextIO, status: TextIO) -> None:
        self.args = arguments
        self.stdout = stdout
        self.stderr = stderr
        self._status = status
        self.pid = int(status.readline())
        self.returncode = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._status.readline())
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Reads stdout to its end, which pytest's timeout bounds, and waits for the program to exit."""
        out = self.stdout.read()
        self.wait(timeout)
        self.stderr.seek(0)
        return out, self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_) -> None:
        self.send_signal(signal.SIGKILL)
        for file in (self.stdout, self.stderr, self._status):
            file.close()


# The server's side


def serve(control: socket.socket) -> tuple[list, list[int]]:
    """Forks a program for each request, until pytest exits. Returns, in each program, its request and descriptors."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, LARGEST_REQUEST, 3)
        with suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:  # else they would stay, and `time` would not count what they took
                pass
        if not message:
            os._exit(0)
        if not os.fork():  # a process that waits for the program
            control.close()
            if not (pid := os.fork()):
                return json.loads(message), fds
            os.close(fds[0])  # whose end tells that the program has exited
            os.close(fds[1])
            try:
                os.write(fds[2], b"%d\n" % pid)
                os.write(fds[2], b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            finally:  # the test may not have waited for it
                os._exit(0)
        for fd in fds:
            os.close(fd)


def become(arguments: list[str], cwd: str, environment: dict[str, str], fds: list[int]) -> None:
    """Does in this process what `python *arguments` does."""
    for standard, fd in enumerate([os.open(os.devnull, os.O_RDONLY), *fds[:2]]):
        os.dup2(fd, standard)
        os.close(fd)
    os.close(fds[2])
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    tempfile.tempdir = None
    numpy.random.seed()  # or all programs would draw the same numbers
    main = types.ModuleType("__main__")
    file, *sys.argv = arguments
    if file == "-c":
        source = sys.argv[0]
        sys.argv[0] = "-c"
        folder = ""
    else:
        source = Path(file).read_text()
        main.__file__ = file
        folder = str(Path(file).resolve().parent)
        sys.argv.insert(0, file)
    sys.path[0:1] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.modules["__main__"] = main
    exec(compile(source, "<string>" if file == "-c" else file, "exec"), main.__dict__)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        sys.modules["triton"] = None  # torch._dynamo works without it; it reports frozen objects as leaks
        for module in PRELOADED:
            __import__(module)
        del sys.modules["triton"]
        gc.freeze()  # else the garbage collector of each program would visit these objects, and so copy their memory
        request, descriptors = serve(control)
    become(*request, descriptors)
