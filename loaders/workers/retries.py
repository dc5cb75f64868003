"""Reads again after an error that can pass, such as those of a network share or a server."""

import errno
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..background import reraise_of_signal
from ..errors import text_of
from .messages import Note

NAMES = (
    "EIO ESTALE ETIMEDOUT ECONNRESET ECONNABORTED ECONNREFUSED EHOSTDOWN EHOSTUNREACH ENETDOWN ENETRESET ENETUNREACH "
    "ENOTCONN EREMOTEIO EAGAIN EBUSY EINTR"
)
CAN_PASS = {getattr(errno, name) for name in NAMES.split() if hasattr(errno, name)}
CAUSES = 10  # how many errors that caused an error are looked at
FIRST_PAUSE = 0.1  # seconds: each pause is ten times as long as the one before
LONGEST_PAUSE = 10.0

T = TypeVar("T")
Keep = Callable[[], Callable[[], None]]  # returns what sets random generators back to their states of now


def can_pass(error: BaseException | None) -> bool:
    """Returns whether the error is an OSError that may not come again, or was caused by one."""
    for _ in range(CAUSES):
        if isinstance(error, (ConnectionError, TimeoutError)):
            return True
        if isinstance(error, OSError) and error.errno in CAN_PASS:
            return True
        if error is not None:
            error = error.__cause__ or error.__context__
    return False


def tried(read: Callable[[], T], retries: int, name: Any, retried: list[Note], keep: Keep | None = None) -> T:
    """Returns read(), which is called up to `retries` more times after errors that can pass.

    Adds (name, reason) to `retried` for each of these errors. keep: read() draws from generators that it does
    not seed, so they are set back before it is called again.
    """
    restore = keep() if keep is not None and retries else None
    for number in range(retries):
        try:
            return read()
        except Exception as error:
            reraise_of_signal(error)
            if not can_pass(error):
                raise
            retried.append((name, text_of(error)))
        if restore is not None:
            restore()
        time.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 10**number))
    return read()
