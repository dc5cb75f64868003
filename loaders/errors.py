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


def text_of(error: BaseException) -> str:
    """Returns the error's class and its text, for a log; if its own `__str__` raises, what that raised."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as failure:
        return f"{name} (its __str__ raised {type(failure).__name__})"
