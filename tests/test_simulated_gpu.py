"""Runs the scenarios in a process of their own, because the simulated device patches torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from tests.loaders.preload.mutants import MUTANTS, ROOT

# Files below this folder.
SCENARIOS = ("loaders/preload/on_simulated_gpu.py", "train_on_simulated_gpu.py")


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch cannot define a device in Python",
)
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_a_simulated_gpu(chosen):
    files = [str(Path(__file__).parent / scenarios) for scenarios in SCENARIOS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--noconftest", "-o", "addopts=", "-m", chosen, *files]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to import
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]


def test_every_mutant_changes_the_code_as_it_is():
    changes = [(name, path, before) for name, changes in MUTANTS.items() for path, before, _ in changes]
    assert [name for name, path, before in changes if before not in (ROOT / path).read_text()] == []
