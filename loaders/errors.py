"""What a user is told: the base class of errors whose sentence is enough, and warnings that come once."""

import logging
from functools import cache

log = logging.getLogger(__name__)


class ExpectedError(Exception):
    """Says in one sentence what is wrong, with the value, and what to do: a program shows it without a traceback.

    Other packages derive their errors from it too, beside a built-in class: `class BadFile(ExpectedError, OSError)`.
    """


@cache
def warn_once(sentence: str, *values: str) -> None:
    """Logs a warning; with the same values once in a process."""
    log.warning(sentence, *values)
