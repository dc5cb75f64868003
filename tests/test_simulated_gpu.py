"""Runs each file of scenarios in a process of its own, because the simulated device patches torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

# Files below this folder.
SCENARIOS = ("loaders/preload/on_simulated_gpu.py", "train_on_simulated_gpu.py")


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch cannot define a device in Python",
)
@pytest.mark.parametrize("scenarios", SCENARIOS)
def test_on_a_simulated_gpu(scenarios):
    file = Path(__file__).parent / scenarios
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--noconftest", "-n", "0", str(file)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
