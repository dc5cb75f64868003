import importlib.metadata
from pathlib import Path

import pytest

from scripts.missing_requirements import first_missing

REPOSITORY = Path(__file__).resolve().parents[2]
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


def test_what_a_run_needs_is_not_among_the_packages_for_tests():
    runtime, tests = (REPOSITORY / "requirements.txt").read_text().split("\n# Tests")
    assert "\npsutil>=" in runtime and "psutil" not in tests
