"""Runs the scenarios in processes of their own, because the simulated device patches torch."""

import os

import pytest
from torch.utils import backend_registration

from tests.forks import PYTEST
from tests.loaders.preload.mutants import MUTANTS, ROOT

OPTIONS = ("-q", "-x", "--noconftest", "-o", "addopts=")
LOADERS = "tests/loaders/preload/on_simulated_gpu.py"


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch cannot define a device in Python",
)
@pytest.mark.parametrize(
    "chosen",
    [
        (LOADERS, "-m", "not slow", "-k", "bytes"),
        (LOADERS, "-m", "not slow", "-k", "not bytes"),
        ("tests/train_on_simulated_gpu.py",),
        pytest.param((LOADERS, "-m", "slow"), marks=pytest.mark.slow),
    ],
)
def test_on_a_simulated_gpu(python, chosen):
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to import
    finished = python.run(*PYTEST, *OPTIONS, *chosen, cwd=ROOT, env=environment, timeout=250)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]


def test_every_mutant_changes_the_code_as_it_is():
    changes = [(name, path, before) for name, changes in MUTANTS.items() for path, before, _ in changes]
    assert [name for name, path, before in changes if before not in (ROOT / path).read_text()] == []
