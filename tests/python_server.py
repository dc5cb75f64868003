"""Starts Python programs quickly: a server that has imported torch and Hydra forks itself for each program.

Importing these takes seconds, most of the time of a short program. A program started here differs from a fresh one in
one way: the modules in PRELOADED are imported already, with the server's environment variables. It imports this
repository's modules itself, is its own `__main__`, and exits as any interpreter does, unless it has a quick exit.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[1]
# The first optimizer imports torch._dynamo.
PRELOADED = ("hydra", "multiprocessing.process", "numpy", "torch", "tqdm", "yaml", "tabulate", "torch._dynamo")
LARGEST_REQUEST = 1 << 17  # bytes


class PythonServer:
    """A server process. `start` and `run` work like subprocess.Popen and subprocess.run with this interpreter."""

    def __init__(self) -> None:
        self._control, servers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with servers:
            command = [sys.executable, __file__, str(servers.fileno())]
            # A new session, so that Ctrl-C in the terminal does not reach the server, which would print a traceback.
            options = {"pass_fds": [servers.fileno()], "start_new_session": True}
            # Python's own choice of warnings, whatever the user's is: tests look at what programs print.
            self._process = subprocess.Popen(command, env={**os.environ, "PYTHONWARNINGS": ""}, **options)

    def start(
        self,
        *arguments: object,
        cwd: Path = ROOT,
        env: dict[str, str] | None = None,
        output: TextIO | None = None,
        quick_exit: bool = False,
    ) -> Program:
        """Starts `python *arguments`: "-c" and a program's text, or a script's path; then the program's arguments.

        Its stdout and stderr go to `output` if that is given, else to pipes that `communicate` reads.
        `quick_exit` saves 0.3 s of CPU time in tests that are not about how a program exits: see `exit_quickly`.
        """
        request = {
            "quick_exit": quick_exit,
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd),
            "env": dict(os.environ) if env is None else env,
        }
        (out, their_out), (err, their_err) = [
            (None, os.dup(output.fileno())) if output else os.pipe() for _ in range(2)
        ]
        status, their_status = os.pipe()
        theirs = [their_out, their_err, their_status]
        with open(os.devnull) as nothing:
            socket.send_fds(self._control, [json.dumps(request).encode()], [nothing.fileno(), *theirs])
        for fd in theirs:
            os.close(fd)
        return Program(arguments, out, err, status)

    def run(
        self, *arguments: object, timeout: float, check: bool = False, **options
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end and captures its output. Raises AssertionError if `check` and it fails."""
        with self.start(*arguments, **options) as program:
            out, err = program.communicate(timeout)
        if check and program.returncode:
            raise AssertionError(f"the program exited with {program.returncode}:\n{err}")
        return subprocess.CompletedProcess(arguments, program.returncode, out, err)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class Program:
    """A program that the server has started, with the methods of subprocess.Popen that tests use."""

    def __init__(self, arguments: tuple, stdout: int | None, stderr: int | None, status: int) -> None:
        self.args, self.returncode = arguments, None
        self.stdout, self.stderr = (None if fd is None else os.fdopen(fd) for fd in (stdout, stderr))
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Reads stdout and stderr to their ends, and waits for the program to exit."""
        texts = ["", ""]

        def read(number: int, file: TextIO) -> None:
            with file:
                texts[number] = file.read()

        files = [(number, file) for number, file in enumerate((self.stdout, self.stderr)) if file and not file.closed]
        threads = [threading.Thread(target=read, args=args, daemon=True) for args in files]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.returncode is None and not select.select([self._status], [], [], 0)[0]:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        self.communicate()


# The server's side


def serve(control: socket.socket) -> tuple[dict, list[int]]:
    """Forks a program for each request, until pytest exits. Returns, in each program, its request and descriptors."""
    running: dict[int, tuple[int, int]] = {}  # pidfd -> pid, the pipe for its exit status
    while True:
        for fd in select.select([control, *running], [], [])[0]:
            if fd in running:
                pid, status = running.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):  # the test did not wait for it
                    os.write(status, b"%d\n" % code)
                os.close(status)
                os.close(fd)
                continue
            message, fds, _, _ = socket.recv_fds(control, LARGEST_REQUEST, 4)
            if not message:
                os._exit(0)
            if not (pid := os.fork()):
                control.close()
                for pidfd, (_, status) in running.items():
                    os.close(pidfd)
                    os.close(status)
                return json.loads(message), fds
            os.write(fds[3], b"%d\n" % pid)
            running[os.pidfd_open(pid)] = pid, fds[3]
            for fd in fds[:3]:
                os.close(fd)


def become(request: dict, fds: list[int]) -> tuple[object, dict]:
    """Turns this process into `python *arguments`. Returns the program's code and namespace, for exec."""
    import multiprocessing.process
    import tempfile
    import types

    import numpy

    for standard, fd in enumerate(fds[:3]):
        os.dup2(fd, standard)
    for fd in fds:
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    multiprocessing.process.ORIGINAL_DIR, tempfile.tempdir = os.getcwd(), None
    numpy.random.seed()  # or all programs would draw the same numbers
    if request["quick_exit"]:
        atexit.register(exit_quickly, dict(sys.modules))  # the first to be registered is the last to be called
    main = types.ModuleType("__main__")
    first, *rest = request["arguments"]
    if first == "-c":
        source, file, sys.argv, folder = rest[0], "<string>", ["-c", *rest[1:]], ""
    else:
        source, file, sys.argv, folder = Path(first).read_text(), first, [first, *rest], str(Path(first).parent)
        main.__file__ = first
    sys.path[0:1] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.modules["__main__"] = main
    return compile(source, file, "exec"), main.__dict__


def exit_quickly(preloaded: dict[str, object]) -> None:
    """Lets the interpreter exit without clearing the preloaded modules, and without destructors of C++ libraries."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # called before the destructors, with the program's exit code
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(preloaded))  # never freed
    for name in preloaded.keys() - set(sys.builtin_module_names):
        sys.modules.pop(name, None)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        sys.modules["triton"] = None  # torch._dynamo works without it; it reports frozen objects as leaks
        for module in PRELOADED:
            __import__(module)
        del sys.modules["triton"]
        gc.freeze()  # else the garbage collector of each program would visit these objects, and so copy their memory
        code, namespace = become(*serve(control))
    exec(code, namespace)
