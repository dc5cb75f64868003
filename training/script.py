"""What all scripts share: the parser of their arguments, and errors that are shown as one sentence."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable

from loaders import ExpectedError


def parser(about: str | None) -> ArgumentParser:
    """A parser whose help is `about`, the script's docstring."""
    return ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)


def run_script(main: Callable[[], object]) -> None:
    """Runs a script's `main`. An error about a setting, a file or the machine is shown as one sentence."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        main()
    except (ExpectedError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
