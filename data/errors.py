"""The exception of this package, and the check of a setting that has a few known values."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class DataError(ValueError):
    """Data are missing or damaged: one sentence with the file or value, and what to do about it.

    It takes a single string, so that it can be pickled and raised again in another process.
    """


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """A question that names the known value nearest to `given`; empty if none is near."""
    name = "cuda" if given == "gpu" else str(given)  # near in meaning, not in spelling
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


def check_choice(key: str, value: object, choices: Collection[str], error: type[ValueError] = DataError) -> None:
    """Raises `error` unless `value` is one of `choices`."""
    if value not in choices:
        raise error(f"{key}={value}: {did_you_mean(value, choices)}it is one of {', '.join(choices)}")
