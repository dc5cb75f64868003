"""A name that is none of those known is answered with the nearest that is."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question to put into an error, or nothing where nothing is near."""
    near = get_close_matches(str(given), list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


def check_choice(key: str, value: str, choices: Iterable[str], error: type[ValueError] = ValueError) -> None:
    """Raises `error` unless `value` is one of `choices`."""
    if value not in choices:
        raise error(f"{key}={value}: {did_you_mean(value, choices)}it is one of {', '.join(choices)}")
