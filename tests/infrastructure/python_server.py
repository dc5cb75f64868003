"""Starts Python programs quickly: a server that has imported torch and Hydra forks itself for each program.

Importing these takes seconds, most of the time of a short program. A program started here differs from a fresh one in
two ways: the modules in PRELOADED are imported already, with the server's environment variables, and its exit neither
clears them nor runs the destructors of C++ libraries, which would copy most of the server's memory. It imports this
repository's modules itself, is its own `__main__`, and exits as any interpreter does but for that.

All processes of one run of pytest share a server: the first that needs it starts it, and it exits after the last one.
"""

from __future__ import annotations

import atexit
import ctypes
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

ROOT = Path(__file__).parents[2]
# The first optimizer imports torch._dynamo.
PRELOADED = ("hydra", "torch", "tqdm", "yaml", "tabulate", "torch._dynamo")
LARGEST_REQUEST = 1 << 17  # bytes
MADV_COLLAPSE = 25  # of Linux 6.1; older ones refuse it


class PythonServer:
    """The server of this name: `start` and `run` are subprocess.Popen and subprocess.run with this interpreter."""

    def __init__(self, name: str) -> None:
        address = f"\0{name}"  # no file, so none is left behind
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while self._control.connect_ex(address):
            start_server(address)

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
        self._control.shutdown(socket.SHUT_RDWR)  # a process that a test has forked may hold a copy of it
        self._control.close()


def start_server(address: str) -> None:
    """Starts a server, unless another process does so at this moment. It answers when it has imported torch."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            return
        listener.listen()
        listener.set_inheritable(True)
        # Python's own choice of warnings, whatever the user's is: tests look at what programs print.
        environment = {**os.environ, "PYTHONWARNINGS": ""}
        command = [sys.executable, __file__, str(listener.fileno())]
        # A new session, so that Ctrl-C in the terminal does not reach the server, which would print a traceback.
        os.posix_spawn(sys.executable, command, environment, setsid=True)


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


def use_huge_pages() -> None:
    """Makes forks of this process twice as fast: a fork copies an entry per page, and torch takes 400 MB of pages."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, file, *name = line.split()
        if access == "rw-p" and file == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def forget_modules(modules: dict[str, types.ModuleType]) -> None:
    """Has the interpreter exit without clearing these modules."""
    for name in modules:
        sys.modules.pop(name, None)


def serve(listener: socket.socket) -> tuple[list, list[int]]:
    """Forks a program for each request, until pytest exits. Returns, in each program, its request and descriptors."""
    running: dict[int, tuple[int, int]] = {}  # the process and the descriptor for its status, by its pidfd
    controls: dict[int, socket.socket] = {}  # one for each process of pytest
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                control, _ = listener.accept()
                controls[control.fileno()] = control
                poll.register(control, select.POLLIN)
                continue
            if fd in running:
                pid, status = running.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):  # the test may not have waited for it
                    os.write(status, b"%d\n" % code)
                poll.unregister(fd)
                os.close(fd)
                os.close(status)
                continue
            message, fds, _, _ = socket.recv_fds(controls[fd], LARGEST_REQUEST, 3)
            if not message:
                poll.unregister(fd)
                controls.pop(fd).close()
                if not controls:
                    os._exit(0)
                continue
            pid = os.fork()
            if not pid:
                for control in (listener, *controls.values()):
                    control.close()
                for pidfd, (_, status) in running.items():
                    os.close(pidfd)
                    os.close(status)
                return json.loads(message), fds
            with suppress(BrokenPipeError):
                os.write(fds[2], b"%d\n" % pid)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, fds[2]
            poll.register(pidfd, select.POLLIN)
            os.close(fds[0])  # whose end tells that the program has exited
            os.close(fds[1])


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
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        preloaded: dict[str, types.ModuleType] = {}
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(preloaded))  # it is never freed
        atexit.register(forget_modules, preloaded)  # first, so that it runs last
        sys.modules["triton"] = None  # torch._dynamo works without it; it reports frozen objects as leaks
        for module in PRELOADED:
            __import__(module)
        del sys.modules["triton"]
        preloaded.update(sys.modules)
        for module in ("__main__", "builtins", "sys"):
            del preloaded[module]
        gc.freeze()  # else the garbage collector of each program would visit these objects, and so copy their memory
        use_huge_pages()
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # before the destructors of libraries that are loaded by now
        request, descriptors = serve(listener)
    become(*request, descriptors)
