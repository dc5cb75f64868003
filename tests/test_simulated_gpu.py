"""Runs the scenarios, and training, in processes of their own, because the simulated device patches torch."""

import json
import os

import pytest
from torch.utils import backend_registration

from tests.infrastructure.forks import PYTEST
from tests.infrastructure.mutants import MUTANTS, ROOT, SCENARIOS

OPTIONS = ("-q", "-x", "--noconftest", "-o", "addopts=", *SCENARIOS)
RESUMED = """
import sys
from pathlib import Path
from tests.infrastructure import simulated_gpu as sim
from tests.configs import DARKENED, checkpoint, differences, stop, train
from training.stopping import Stopped
sim.copy_seconds, sim.kernel_seconds = 0.0002, 0.001
folder = Path(sys.argv[1])
settings = ["device=sim:0", "model=linear", "loader=prefetch", "loader.num_workers=1", DARKENED]
train(folder / "whole", *settings, "loader.preload_depth=0", "device=cpu")
try:
    train(folder / "part", *settings, *stop(5))
    raise AssertionError("it was not stopped")
except Stopped:
    train(folder / "part", *settings)
assert differences(*(checkpoint(folder / name)["model"] for name in ("part", "whole"))) == []
assert sim.errors == []
"""
needs_a_device_in_python = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch cannot define a device in Python",
)


@needs_a_device_in_python
@pytest.mark.timeout(300)
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_a_simulated_gpu(python, chosen):
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to import
    finished = python.run(*PYTEST, *OPTIONS, "-m", chosen, cwd=ROOT, env=environment, timeout=250)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]


@needs_a_device_in_python
def test_a_run_on_a_simulated_gpu_has_the_bits_of_one_on_the_cpu_after_a_resume_too(python, tmp_path, bound):
    python.run("-c", RESUMED, tmp_path, cwd=ROOT, timeout=2 * bound, check=True)
    summary = json.loads((tmp_path / "part" / "summary.json").read_text())
    assert (summary["device"], summary["loader"]) == ("sim:0", "prefetch")
    assert 0 <= summary["data_wait_fraction"] <= 1


def test_every_mutant_changes_the_code_as_it_is():
    changes = [(name, path, before) for name, changes in MUTANTS.items() for path, before, _ in changes]
    assert [name for name, path, before in changes if before not in (ROOT / path).read_text()] == []
