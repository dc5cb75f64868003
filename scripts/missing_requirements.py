"""Prints the first line of requirements.txt that this Python's packages do not satisfy, and exits with 1.

environment.sh runs this with the Python of a .venv that it did not make. It imports and installs none of them.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement  # which pytest and matplotlib install


def first_missing(lines: list[str]) -> str | None:
    """The first requirement that is not installed, or whose installed version is out of its range."""
    texts = [line.partition("#")[0].strip() for line in lines]
    for text in (text for text in texts if text and not text.startswith("-")):  # an option of pip starts with -
        requirement = Requirement(text)
        try:
            if requirement.marker is None or requirement.marker.evaluate():
                found = version(requirement.name)
                if not requirement.specifier.contains(found, prereleases=True):
                    return f"{text} (it has {found})"
        except PackageNotFoundError:
            return text
    return None


if __name__ == "__main__":
    if missing := first_missing(Path(__file__).parents[1].joinpath("requirements.txt").read_text().splitlines()):
        print(missing)
        sys.exit(1)
