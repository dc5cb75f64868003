import importlib.metadata

import pytest

from scripts.missing_requirements import first_missing

VERSION = importlib.metadata.version("pytest")


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        (["# a comment", "", "pytest>=8.0  # and another", "--extra-index-url https://example.org"], None),
        (["no-such-package>=1; python_version < '3'", "pytest"], None),
        (["pytest", "no-such-package>=1  # why", "nor-this"], "no-such-package>=1"),
        (["pytest<1"], f"pytest<1 (it has {VERSION})"),
    ],
)
def test_the_first_requirement_that_is_not_satisfied_is_named(lines, missing):
    assert first_missing(lines) == missing
