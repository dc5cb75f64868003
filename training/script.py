"""What all scripts share: the parser of their arguments, and errors that are shown as one sentence."""

from __future__ import annotations

import logging
import os
import select
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from loaders import ExpectedError


def parser(about: str | None) -> ArgumentParser:
    """A parser whose help is `about`, the script's docstring."""
    return ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)


def run_script(main: Callable[[], object]) -> None:
    """Runs a script's `main`. An error about a setting, a file or the machine is shown as one sentence.

    The script's own folder leaves sys.path, where Python puts it: else `import evaluate` in anyone's code would find
    extras/finished/evaluate.py.
    """
    own_folder = Path(sys.argv[0]).resolve().parent
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != own_folder]
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # it has been read from
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack the letters of a class's name
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        with flushing():
            main()
    except (ExpectedError, OSError) as error:
        if isinstance(error, BrokenPipeError) and reader_has_exited():
            sys.exit(1)
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def flushing() -> Iterator[None]:
    """Writes what stdout's buffer has when the block ends, where an error of it is a sentence."""
    try:
        yield
    except SystemExit:  # as after --help
        print(end="", flush=True)
        raise
    print(end="", flush=True)


def reader_has_exited() -> bool:
    """Whether the program that reads stdout has exited, as `| head` does. Then stdout is discarded."""
    if not hasattr(select, "poll"):  # Windows
        return False
    stdout = select.poll()
    stdout.register(1, 0)
    has_exited = any(event & select.POLLERR for _, event in stdout.poll(0))
    if has_exited:
        discard_stdout()
    return has_exited


def discard_stdout() -> None:
    """Lets what is written to stdout go to nowhere, also what its buffer still has."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
