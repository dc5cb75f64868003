"""The one exception of this package, and the check of a choice that raises it."""

import difflib
from collections.abc import Collection


class DataError(ValueError):
    """Data that are missing or broken: one sentence with the file or value, and what to do about it.

    It takes a single string, so that it survives pickling and being raised again in another process.
    """


def check_choice(key: str, value: object, choices: Collection[str]) -> None:
    """Raises DataError unless `value` is one of `choices`."""
    if value not in choices:
        guess = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {guess[0]}?" if guess else f"use one of {', '.join(choices)}"
        raise DataError(f"{key}={value} is unknown; {hint}")
