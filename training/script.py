"""What all scripts share: the parser of their arguments, and errors that are shown as one sentence."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import suppress
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
        main()
    except (ExpectedError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
